"""The synchronous twin: complete, typed, and the same behaviour from any thread."""

from __future__ import annotations

import ast
import inspect
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from libdsec import DSecContainerRunArgs, DSecError, NotFound, Unavailable, WrongState, stubs, sync
from tests.unit.wire_server import WireServer, in_thread

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


@pytest.fixture
def server(tmp_path):
    server = WireServer(tmp_path)
    with in_thread(server) as loop:
        server.loop = loop
        yield server


@pytest.fixture
def client(server):
    with sync.DSecClientSync(server.socket) as client:
        yield client
    assert not [t for t in threading.enumerate() if t.name == "libdsec-sync"]


# --- completeness


@pytest.mark.parametrize("original", stubs.MIRRORED)
def test_every_public_method_has_its_twin(original):
    twin = getattr(sync, f"{original.__name__}Sync")
    for name, value in inspect.getmembers_static(original):
        if name.startswith("_"):
            continue
        other = inspect.getattr_static(twin, name)
        if isinstance(value, property):
            assert isinstance(other, property)
        else:
            assert not inspect.iscoroutinefunction(other)
            mine, theirs = inspect.signature(value), inspect.signature(other)
            assert list(mine.parameters) == list(theirs.parameters), name
            for parameter in mine.parameters.values():
                assert theirs.parameters[parameter.name].default == parameter.default
    assert hasattr(original, "__aenter__") == hasattr(twin, "__enter__")
    assert hasattr(original, "__anext__") == hasattr(twin, "__next__")


def test_constructor_takes_the_same_arguments():
    from libdsec import DSecClient

    mine, theirs = inspect.signature(DSecClient), inspect.signature(sync.DSecClientSync)
    assert mine.parameters == theirs.parameters


def test_stub_is_current_and_lists_every_class():
    text = stubs.STUB.read_text()
    assert text == stubs.render(), "run: python -m libdsec.stubs"
    classes = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert classes == set(sync.__all__)
    assert "async def" not in text


# --- behaviour


def test_session_of_listing_1(client):
    sandbox = client.run_container(ARGS, timeout=120)
    result = sandbox.run_shell("echo hello world")
    assert result.stdout == "hello world\n"
    assert sandbox.stop().state == "stopped"
    assert client.welcome.node == "n1"


def test_namespaces_handles_and_iterators(client, tmp_path):
    with client.run_container(ARGS) as sandbox:
        sandbox.files.write("f", b"x" * 1_000_000)
        assert sum(map(len, sandbox.files.read("f", format="stream"))) == 1_000_000
        for block in sandbox.files.read("f", format="stream"):
            assert block
            break
        handle = sandbox.commands.run("echo a; echo b >&2", background=True)
        assert {(part.stream, part.data) for part in handle} == {(1, b"a\n"), (2, b"b\n")}
        assert handle.wait().ok
        with sandbox.create_session() as session:
            assert session.run("true").ok
        seen = []
        sandbox.run_shell("echo x", on_stdout=seen.append)
        assert seen == ["x\n"]
        (tmp_path / "up").write_text("u")
        assert sandbox.files.upload(tmp_path / "up", "up") == 1
    assert not sandbox.is_running()
    assert repr(sandbox).startswith("<sync <Sandbox")


def test_batch(server, client):
    args = DSecContainerRunArgs(container_image="b", labels={"fail_every": "3"})
    made = list(client.run_containers(args, 6))
    assert sum(isinstance(item, DSecError) for item in made) == 2
    assert all(item.run("true").ok for item in made if isinstance(item, sync.SandboxSync))


def test_forward(client):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(10)

        def serve():
            end, _ = listener.accept()
            with end, end.makefile("rb") as lines:
                end.sendall(lines.readline())

        served = threads.submit(serve)
        reader, writer = client.run_container(ARGS).forward(listener.getsockname()[1])
        writer.write(b"line\n")
        writer.drain()
        assert reader.readline() == b"line\n"
        writer.close()
        served.result()


def test_many_threads_share_a_client(server, client):
    sandbox = client.run_container(ARGS)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: sandbox.run("echo", str(n)).stdout, range(32)))
    assert results == [f"{n}\n" for n in range(32)]
    assert server.count("hello") == 1


def test_calls_from_a_callback_are_refused_not_deadlocked(client):
    sandbox = client.run_container(ARGS)
    with pytest.raises(WrongState, match="callback"):
        sandbox.run_shell("echo x", on_stdout=lambda text: sandbox.stop())


def test_errors_and_closing(server, tmp_path):
    with pytest.raises(Unavailable, match="start"):
        sync.DSecClientSync(str(tmp_path / "none")).open()
    client = sync.DSecClientSync(server.socket)
    client.open()
    with pytest.raises(NotFound):
        client.connect("n1-9")
    client.close()
    client.close()
    with pytest.raises(WrongState):
        client.host_stats()


def test_interrupt_cancels_the_call(server, client):
    sandbox = client.run_container(ARGS)
    main = threading.main_thread().ident

    def interrupt():
        import signal

        while not any(each.process for each in tuple(server.world.commands.values())):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run_shell("sleep 60")
    thread.join()
    client.host_stats()
    assert "exec.run" in server.cancels

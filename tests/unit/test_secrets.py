"""Secrets as arguments, in files, in heads and bodies; the authority. No sockets."""

from __future__ import annotations

import base64
import ssl
import stat
from pathlib import Path

import h11
import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from dsecd.secrets import heads, trust
from dsecd.secrets.authority import Authority
from dsecd.secrets.heads import Refused
from dsecd.secrets.mask import Mask
from dsecd.secrets.secret import Header, Secret, digest, parse, redacted
from dsecd.secrets.vault import Vault
from libdsec.errors import InvalidArgument, Unavailable

HOST = "api.example.com"
VALUE = "Bearer tok-0123456789abcdef"
SECRET = Secret(HOST, (Header("Authorization", VALUE),))

# --- arguments ------------------------------------------------------------------------------------


def test_a_header_is_given_by_name_or_as_a_line() -> None:
    assert parse({HOST: {"Authorization": VALUE}}) == (SECRET,)
    assert parse({"API.example.com.": f"Authorization:  {VALUE} "}) == (SECRET,)
    assert parse({}) == ()


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"*.example.com": {"A": VALUE}}, "each name in full"),
        ({"10.0.0.1": {"A": VALUE}}, "neither a domain name nor an IPv4 address"),
        ({"localhost": {"A": VALUE}}, "a domain has a dot"),
        ({HOST: {}}, "1 to 8 headers"),
        ({HOST: VALUE}, "Header-Name: value"),
        ({HOST: {"Host": VALUE}}, "the proxy's own"),
        ({HOST: {"transfer-encoding": VALUE}}, "the proxy's own"),
        ({HOST: {"Proxy-Authorization": VALUE}}, "the proxy's own"),
        ({HOST: {"Bad Name": VALUE}}, "letters, digits and hyphens"),
        ({HOST: {"A": f"{VALUE}\r\nX-Other: 1"}}, "on one line"),
        ({HOST: {"A": f"{VALUE}\0"}}, "printable"),
        ({HOST: {"A": f" {VALUE}"}}, "without blanks"),
        ({HOST: {"A": ""}}, "1 to 8192"),
        ({HOST: {"A": VALUE * 1000}}, "1 to 8192"),
        ({HOST: {"A": VALUE, "a": VALUE}}, "given twice"),
        ({HOST: {"A": VALUE}, HOST.upper(): {"A": VALUE}}, "given twice"),
        ({f"h{n}.example.com": {"A": VALUE} for n in range(33)}, "at most 32"),
    ],
)
def test_what_is_no_secret_is_refused_without_showing_it(
    given_: dict[str, dict[str, str] | str], why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        parse(given_)
    assert caught.value.detail == {"field": "secrets"}
    assert "0123456789abcdef" not in caught.value.message


def test_no_representation_shows_a_value() -> None:
    assert "0123456789abcdef" not in repr(SECRET)
    assert "0123456789abcdef" not in str([SECRET])
    shown = redacted({HOST: {"Authorization": VALUE}, "b.example.com": f"X-Key: {VALUE}"})
    assert shown == {HOST: {"Authorization": "***"}, "b.example.com": {"X-Key": "***"}}
    assert redacted(shown) == shown
    with pytest.raises(InvalidArgument, match="give its value again"):
        parse(shown)


def test_a_digest_tells_values_apart_and_salts_do_too() -> None:
    one, other = {HOST: {"A": "one-value"}}, {HOST: {"A": "another-value"}}
    assert digest(one, "k") == digest(dict(one), "k") != digest(other, "k")
    assert digest(one, "k") != digest(one, "l")
    assert digest({}, "k") == b""


# --- heads ----------------------------------------------------------------------------------------


def request(head: bytes) -> h11.Request:
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(head.replace(b"\n", b"\r\n"))
    event = parser.next_event()
    assert isinstance(event, h11.Request)
    return event


def forwarded(head: bytes) -> bytes:
    sent = h11.Connection(h11.CLIENT).send(heads.forward(request(head), SECRET))
    assert sent is not None
    return sent


def test_the_secret_replaces_what_the_sandbox_sends() -> None:
    sent = forwarded(
        b"GET /v1?x=1 HTTP/1.1\nhost: API.example.com:443\nauthorization: Bearer mine\n"
        b"AUTHORIZATION: second\nX-Kept: a\nAccept-Encoding: gzip\nExpect: 100-continue\n\n"
    )
    assert sent.splitlines() == [
        b"GET /v1?x=1 HTTP/1.1", b"Host: api.example.com", b"X-Kept: a",
        f"Authorization: {VALUE}".encode(), b"Accept-Encoding: identity", b"Connection: close", b"",
    ]  # fmt: skip


def test_servers_that_take_underscores_for_hyphens_get_one_value() -> None:
    secret = Secret(HOST, (Header("X-Api-Key", VALUE),))
    head = request(b"GET / HTTP/1.1\nHost: api.example.com\nX_Api-Key: mine\n\n")
    names = [name for name, _ in heads.forward(head, secret).headers]
    assert names.count(b"x-api-key") == 1
    assert b"x_api-key" not in names


def test_connection_options_cannot_take_the_secret_away() -> None:
    sent = forwarded(
        b"GET / HTTP/1.1\nHost: api.example.com\nConnection: authorization, x-mine, upgrade\n"
        b"X-Mine: 1\nUpgrade: websocket\nTE: trailers\nKeep-Alive: timeout=5\n\n"
    )
    assert f"Authorization: {VALUE}".encode() in sent
    for gone in (b"X-Mine", b"Upgrade", b"TE:", b"Keep-Alive"):
        assert gone not in sent


def test_framing_is_one_and_survives_connection_options() -> None:
    sent = forwarded(
        b"POST / HTTP/1.1\nHost: api.example.com\nContent-Length: 3\nConnection: content-length\n\n"
    )
    assert sent.count(b"Content-Length: 3") == 1
    sent = forwarded(b"POST / HTTP/1.1\nHost: api.example.com\nTransfer-Encoding: chunked\n\n")
    assert b"Transfer-Encoding: chunked" in sent
    assert b"Content-Length" not in sent


def test_an_absolute_target_of_this_host_becomes_a_path() -> None:
    sent = forwarded(b"GET http://api.example.com/a?b=c HTTP/1.1\nHost: api.example.com\n\n")
    assert sent.startswith(b"GET /a?b=c HTTP/1.1\r\n")
    sent = forwarded(b"GET https://api.example.com:443 HTTP/1.1\nHost: api.example.com\n\n")
    assert sent.startswith(b"GET / HTTP/1.1\r\n")
    sent = forwarded(b"OPTIONS * HTTP/1.1\nHost: api.example.com\n\n")
    assert sent.startswith(b"OPTIONS * HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\nHost: evil.example.org\n\n", 421),
        (b"GET / HTTP/1.1\nHost: api.example.com.evil.org\n\n", 421),
        (b"GET / HTTP/1.1\nHost: api.example.com:8443\n\n", 421),
        (b"GET / HTTP/1.1\nHost: api.example.com:443@evil.org\n\n", 421),
        (b"GET / HTTP/1.1\nHost:\n\n", 421),
        (b"GET / HTTP/1.0\n\n", 400),
        (b"GET http://evil.example.org/ HTTP/1.1\nHost: api.example.com\n\n", 421),
        (b"GET http://api.example.com@evil.org/ HTTP/1.1\nHost: api.example.com\n\n", 421),
        (b"GET http://u:p@api.example.com/ HTTP/1.1\nHost: api.example.com\n\n", 421),
        (b"GET http://[::1/ HTTP/1.1\nHost: api.example.com\n\n", 400),
        (b"GET ftp://api.example.com/ HTTP/1.1\nHost: api.example.com\n\n", 400),
        (b"GET api.example.com/ HTTP/1.1\nHost: api.example.com\n\n", 400),
        (b"OPTIONS *x HTTP/1.1\nHost: api.example.com\n\n", 400),
        (b"CONNECT evil.example.org:443 HTTP/1.1\nHost: evil.example.org:443\n\n", 405),
        (b"CONNECT api.example.com:443 HTTP/1.1\nHost: api.example.com:443\n\n", 405),
        (b"TRACE / HTTP/1.1\nHost: api.example.com\n\n", 405),
        (b"trace / HTTP/1.1\nHost: api.example.com\n\n", 405),
        (b"TRACK / HTTP/1.1\nHost: api.example.com\n\n", 405),
        (b"PRI * HTTP/2.0\nHost: api.example.com\n\n", 505),
        (
            b"POST / HTTP/1.1\nHost: api.example.com\nContent-Length: 4\n"
            b"Transfer-Encoding: chunked\n\n",
            400,
        ),
        (b"POST / HTTP/1.0\nHost: api.example.com\nTransfer-Encoding: chunked\n\n", 400),
    ],
)
def test_a_request_that_is_not_for_this_host_alone_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(Refused) as caught:
        heads.forward(request(head), SECRET)
    assert caught.value.status == status
    assert "0123456789abcdef" not in caught.value.message


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\nHost: api.example.com\nHost: evil.example.org\n\n",
        b"GET / HTTP/1.1\nContent-Length: 1\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nContent-Length: 4\nContent-Length: 5\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nContent-Length: 4, 5\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nContent-Length: +4\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nContent-Length: 0x4\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nTransfer-Encoding: gzip, chunked\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nTransfer-Encoding: identity\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nTransfer-Encoding: xchunked\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nTransfer-Encoding : chunked\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nTransfer-Encoding: chunked, chunked\n\n",
        b"POST / HTTP/1.1\nHost: api.example.com\nX\0Y: 1\n\n",
        b"GET /a b HTTP/1.1\nHost: api.example.com\n\n",
        b"GET / HTTP/1.1 x\nHost: api.example.com\n\n",
        b"GET /\nHost: api.example.com\n\n",
        b" GET / HTTP/1.1\nHost: api.example.com\n\n",
    ],
)
def test_what_two_parsers_could_read_differently_is_no_request(head: bytes) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        request(head)


@given(
    st.lists(
        st.sampled_from(
            [
                b"Host: api.example.com", b"Host: evil.org", b"Content-Length: 4",
                b"content-length: 4", b"Content-Length: 5", b"Transfer-Encoding: chunked",
                b"transfer-encoding:chunked", b"Transfer-Encoding: gzip", b"Authorization: x",
                b"authorization : x", b"Connection: authorization", b" folded: 1", b"\tx",
                b"X: a\rb", b"X: \xff", b"Connection: transfer-encoding, host",
                b"Authorization_: x", b":", b"X",
            ]
        ),
        max_size=6,
    ),
    st.sampled_from([b"GET", b"POST", b"TRACE", b"g", b"CONNECT"]),
    st.sampled_from([b"/", b"//evil.org/", b"http://evil.org/", b"*", b"/\xff", b"evil.org:443"]),
    st.sampled_from([b"\r\n", b"\n"]),
)  # fmt: skip
def test_whatever_is_passed_on_has_one_host_one_framing_and_one_secret(
    lines: list[bytes], method: bytes, target: bytes, end: bytes
) -> None:
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(end.join([method + b" " + target + b" HTTP/1.1", *lines, b"", b""]))
    try:
        event = parser.next_event()
        if not isinstance(event, h11.Request):
            return
        sent = h11.Connection(h11.CLIENT).send(heads.forward(event, SECRET))
    except (h11.RemoteProtocolError, Refused):
        return
    assert sent is not None
    head, *fields = sent.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert b"\n" not in b"".join(fields)
    assert head.split(b" ")[1] in (b"/", b"//evil.org/", b"*")
    names = [field.partition(b":")[0].lower() for field in fields]
    assert fields[0] == b"Host: api.example.com"
    assert names.count(b"host") == 1
    assert [f for f in fields if f.lower().startswith(b"authorization:")] == [
        f"Authorization: {VALUE}".encode()
    ]
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1


def answered(head: bytes) -> h11.Response:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", HOST)]))
    parser.receive_data(head.replace(b"\n", b"\r\n"))
    event = parser.next_event()
    assert isinstance(event, h11.Response)
    return heads.answer(event, Mask([VALUE]))


def test_an_answer_loses_what_is_for_the_proxy_and_the_secret() -> None:
    found = answered(
        b"HTTP/1.1 200 Tok tok-0123456789abcdef\nX-Debug: got Bearer tok-0123456789abcdef!\n"
        b"Location: https://evil.org/?k=tok-0123456789abcdef\nSet-Cookie: a=b\nSet-Cookie: c=d\n"
        b"Alt-Svc: h3=:443\nConnection: x-hop\nX-Hop: 1\nContent-Length: 5\n\n"
    )
    fields = dict(found.headers)
    assert fields[b"x-debug"] == b"got **************************!".replace(
        b"*" * 26, b"*" * len(VALUE)
    )
    assert fields[b"location"] == b"https://evil.org/?k=" + b"*" * 20
    assert [v for n, v in found.headers if n == b"set-cookie"] == [b"a=b", b"c=d"]
    assert {b"alt-svc", b"connection", b"x-hop"}.isdisjoint(fields)
    assert found.reason == b"Tok " + b"*" * 20


def test_an_answer_framed_twice_keeps_the_framing_that_was_read() -> None:
    found = answered(b"HTTP/1.1 200 OK\nContent-Length: 5\nTransfer-Encoding: chunked\n\n")
    assert [name for name, _ in found.headers] == []  # h11 writes it chunked


# --- mask -----------------------------------------------------------------------------------------


def test_a_token_is_hidden_without_its_scheme_and_a_password_without_its_user() -> None:
    basic = base64.b64encode(b"user:pass-word-1").decode()
    mask = Mask([f"Basic {basic}"])
    for shown in (basic, "user:pass-word-1", "pass-word-1"):
        assert mask.clean(f"<{shown}>".encode()) == b"<" + b"*" * len(shown) + b">"
    assert Mask(["Basic not-base64!"]).needles == (b"Basic not-base64!", b"not-base64!")
    assert Mask(["short"]).clean(b"a short text") == b"a short text"


@given(st.lists(st.sampled_from([b"tok-0123", b"456789ab", b"cdef", b"t", b"tok-", b"x", b""])))
def test_pieces_hide_what_the_whole_would(pieces: list[bytes]) -> None:
    mask = Mask([VALUE])
    stream = mask.stream()
    out = b"".join([*map(stream.feed, pieces), stream.end()])
    assert out == mask.clean(b"".join(pieces))


def test_what_cannot_be_a_secret_is_not_held_back() -> None:
    stream = Mask([VALUE]).stream()
    assert stream.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert stream.feed(b"data: tok-01") == b"data: "
    assert stream.feed(b"?\n") == b"tok-01?\n"
    assert stream.end() == b""


# --- authority, vault, trust ----------------------------------------------------------------------


def test_the_authority_is_made_once_and_for_root_alone(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    first = Authority.load(directory)
    assert Authority.load(directory).pem == first.pem
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert b"PRIVATE" not in first.pem
    context = first.context(HOST)
    assert first.context(HOST) is context
    assert {entry.name for entry in directory.iterdir()} == {"ca.key", "ca.pem"}


def test_a_damaged_authority_says_what_to_do(tmp_path: Path) -> None:
    Authority.load(tmp_path)
    (tmp_path / "ca.pem").write_text("rubbish")
    with pytest.raises(Unavailable, match=r"remove .*ca\.pem"):
        Authority.load(tmp_path)


def handshake(server: ssl.SSLContext, ca: bytes, name: str, strict: bool = True) -> None:
    """Shake hands in memory; raises what the client objects to, or the server's alert."""
    client = ssl.create_default_context(cadata=ca.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT if strict else ssl.VerifyFlags(0)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(back, there, server_hostname=name)
    theirs = server.wrap_bio(there, back, server_side=True)
    for side in (ours, theirs, ours, theirs, ours):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert ours.version() == "TLSv1.3"


def test_a_certificate_is_for_its_name_and_trusted_by_strict_clients(tmp_path: Path) -> None:
    authority = Authority.load(tmp_path)
    handshake(authority.context(HOST), authority.pem, HOST)
    long = ".".join(["a" * 60] * 4) + ".example"
    handshake(authority.context(long), authority.pem, long)
    with pytest.raises(ssl.SSLError):
        handshake(authority.context(HOST), authority.pem, "other.example.com")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority.context(HOST), Authority.load(tmp_path / "b").pem, HOST)
    certificate = authority.certificate
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basic.ca, basic.path_length) == (True, 0)


def test_a_vault_holds_a_sandbox_s_secrets_for_root_alone_and_until_it_ends(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "secrets")
    assert vault.recall("s0-1") == ()
    assert vault.sweep(()) == []
    vault.keep("s0-1", (SECRET,))
    vault.keep("s0-2", (SECRET,))
    vault.keep("s0-2", (SECRET,))
    assert Vault(tmp_path / "secrets").recall("s0-1") == (SECRET,)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "secrets").iterdir()]
    assert modes == [0o600, 0o600]
    vault.forget("s0-1")
    vault.forget("s0-1")
    assert vault.recall("s0-1") == ()
    assert vault.sweep({"s0-3"}) == [str(tmp_path / "secrets/s0-2.secrets")]
    (tmp_path / "secrets/s0-4.secrets").write_bytes(b"\xc1")
    with pytest.raises(Unavailable, match="cannot be read"):
        vault.recall("s0-4")


def test_the_bundle_is_the_host_s_and_ours(tmp_path: Path) -> None:
    ours, host = Authority.load(tmp_path / "a").pem, Authority.load(tmp_path / "b").pem
    directory = tmp_path / "trust"
    trust.write(directory, ours, host)
    trust.write(directory, ours, host)  # the next start of the daemon
    assert (directory / "ca.pem").read_bytes() == ours
    assert (directory / "bundle.pem").read_bytes() == host + ours
    context = ssl.create_default_context(cafile=str(directory / "bundle.pem"))
    assert len(context.get_ca_certs()) == 2
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()} == {0o444}
    for path in trust.environment().values():
        assert (directory / Path(path).relative_to(trust.INSIDE)).exists()

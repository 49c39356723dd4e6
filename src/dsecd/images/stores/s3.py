"""A store in a bucket of an S3 server, through obstore.

Objects and names are written by conditional puts (If-None-Match, If-Match), so of many writers one
succeeds. The server replaces an object whole or not at all, and an upload that ends midway is never
seen. Puts of more than `SINGLE_PUT` bytes go in parts, which have no condition that all servers
know: two writers of one object may both succeed there, with the same bytes, since its key is
their digest. The parts of a writer that died stay in the server, unseen and paid for, until a
lifecycle rule of the bucket (AbortIncompleteMultipartUpload) removes them.

A deleted name stays as a record without data, for S3 cannot delete conditionally everywhere.

A put whose answer is lost may have happened. For an object that does not matter. A name's record
carries a version that no other write has, so the next try recognises its own; only when yet
another writer has moved the name since is the outcome unknown, and said to be.

obstore's blocking functions are called in threads of ours. Its coroutines are finished by threads
of the Rust runtime, which abort the process if it exits just then (pyo3-async-runtimes, issue 40).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError
from obstore.store import S3Store as Client

from dsecd.host.probe import Feature
from dsecd.images.stores import keys, record, s3_options
from dsecd.images.stores.abc import Conflict, Entry, Source, size_of
from dsecd.images.stores.record import Record
from dsecd.images.stores.retry import Transient, retry
from dsecd.images.stores.s3_errors import BeyondEnd, Exists, Missing, translate
from dsecd.images.stores.s3_options import Credentials, Place, S3Options
from dsecd.images.stores.workers import Call, Workers
from libdsec.errors import Internal, InvalidArgument, NotFound, Unavailable, Unsupported

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

SINGLE_PUT = 64 << 20
PART = 16 << 20
PARALLEL_PARTS = 4
PARALLEL_UPLOADS = 4  # bounds the memory of single puts
MIN_RATE = 1 << 20  # bytes per second that are waited for, beyond the time limit
PAGE = 1000
SMALL_PUT = 1 << 20
THREADS = 32
_LONGEST_CALL_S = 86400.0  # each has a limit of its own, see _call
_REREAD = timedelta(minutes=15)  # obstore asks for new keys 5 minutes before the old ones expire
FIRST_READ = 1 << 20  # of an object whose size is not known
_SWAP_NEEDED_FOR = "several writers of names in the store"
_NO_SWAP = "compare-and-swap is not supported by this server: names can only be moved by one writer"
T = TypeVar("T")


class S3Store:
    """The store at `place`. Use `dsecd.images.stores.opening.open_store`."""

    def __init__(self, place: Place, who: Credentials, options: S3Options) -> None:
        self._place, self._who, self._options = place, who, options
        self._limit_s = options.timeout_s
        self._try_s = options.timeout_s / 4
        # A thread in a call that nobody waits for any more is free when the client gives up
        patience_s = self._try_s + SINGLE_PUT / MIN_RATE
        self._reader = self._connect(patience_s, read_timeout_s=self._try_s)
        self._writer = self._connect(self._try_s + SMALL_PUT / MIN_RATE)
        self._bulk = self._connect(patience_s, retries=6)
        self._workers = Workers(THREADS, _LONGEST_CALL_S, f"the store {place}")
        self._creates = self._swaps = False
        self._uploads = asyncio.Semaphore(PARALLEL_UPLOADS)
        self._single = asyncio.Lock()
        self.url = f"s3://{'/'.join(part for part in (place.bucket, place.prefix) if part)}"
        self.features: tuple[Feature, ...] = ()

    def _connect(self, timeout_s: float, read_timeout_s: float = 0.0, retries: int = 0) -> Client:
        where, who = self._place, self._who
        config: S3Config = {
            "endpoint": where.endpoint,
            "aws_endpoint_url_s3": where.endpoint,
            "region": where.region,
            "disable_bulk_delete": True,  # not every server has it, and we delete one by one
            "conditional_put": "etag",
            # obstore would take these from the environment, and blobd would know nothing of it
            "virtual_hosted_style_request": False,
            "skip_signature": False,
            "s3_express": False,
        }
        client: ClientConfig = {
            "allow_http": where.endpoint.startswith("http:"),
            "connect_timeout": timedelta(seconds=min(5.0, self._try_s)),
            "timeout": timedelta(seconds=timeout_s),
        }
        if read_timeout_s:
            client["read_timeout"] = timedelta(seconds=read_timeout_s)
        if self._options.ca_file:
            client["root_certificate"] = _certificates(self._options.ca_file)
        policy: RetryConfig = {
            "max_retries": retries, "retry_timeout": timedelta(seconds=self._limit_s)
        }  # fmt: skip
        try:
            return Client(
                where.bucket,
                prefix=where.prefix or None,
                config=config,
                # by a function, or a token in the environment would be mixed with our keys
                credential_provider=None if who.kind == "instance" else self._credentials,
                client_options=client,
                retry_config=policy,
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidArgument(
                f"cannot use {where}: {reason}; check store.options and the AWS_ variables",
                field="store.options",
            ) from error

    def _credentials(self) -> S3Credential:
        """Return the keys; those in a file are read again now and then, for they are rotated."""
        who = self._who
        if who.kind == "file":
            who = s3_options.from_file(who.file, who.profile)
        until = datetime.now(UTC) + _REREAD if who.kind == "file" else None
        return {
            "access_key_id": who.key_id,
            "secret_access_key": who.secret,
            "token": who.token or None,
            "expires_at": until,
        }

    async def start(self) -> None:
        """Find out what the server can do, with an object of our own.

        Raises `NotFound` for the bucket, `PermissionDenied`, `InvalidArgument`, `Unavailable`.
        """
        key = f"probe/{secrets.token_hex(16)}"
        await self._put(key, b"0", "overwrite")
        try:
            self._creates = await self._refuses(key, "create")
            self._swaps = self._creates and await self._compares(key)
        finally:
            await self._delete(key)
        swap = self._swaps or self._options.single_writer
        how = "by If-Match" if self._swaps else "single_writer = true" if swap else _NO_SWAP
        self.features = (
            Feature(
                "store_create",
                self._creates,
                "by If-None-Match"
                if self._creates
                else "the server ignores If-None-Match: objects are looked for first, then put",
                "exact answers to which of several writers was first",
            ),
            Feature("store_swap", swap, how, _SWAP_NEEDED_FOR),
        )

    async def _refuses(self, key: str, mode: PutMode) -> bool:
        """Return whether the server refuses a put whose precondition does not hold."""
        try:
            await self._put(key, b"1", mode)
        except Exists:
            return True
        except (Unsupported, InvalidArgument):  # some say that they do not know the header
            return False
        return False

    async def _compares(self, key: str) -> bool:
        if not await self._refuses(key, {"e_tag": '"00000000000000000000000000000000"'}):
            return False
        meta = await self._call(lambda _: self._reader.head(key), "look at an object")
        if not meta["e_tag"]:
            return False
        return not await self._refuses(key, {"e_tag": meta["e_tag"]})

    # --- objects ----------------------------------------------------------------------------

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        keys.check_fixed(key)
        if not 0 <= start <= (start if end is None else end):
            raise InvalidArgument(f"no range: bytes {start} to {end}", field="start")
        if start == end:
            if await self.size(key) is None:
                raise NotFound(f"the store has no {key}")
            return b""
        what = f"read {key}"
        first = start + FIRST_READ if end is None else end
        try:
            data, size = await self._call(
                lambda _: self._get(key, start, first), what, first - start
            )
            if end is not None or size <= first:
                return data
            # in one request more, now that it is known how long that may take
            rest, _ = await self._call(lambda _: self._get(key, first, size), what, size - first)
            return data + rest
        except Missing:
            raise NotFound(f"the store has no {key}") from None
        except BeyondEnd:
            return b""

    def _get(self, key: str, start: int, end: int) -> tuple[bytes, int]:
        """Return a range of an object and the size of all of it."""
        result = self._reader.get(key, options={"range": (start, end)})
        data = bytes(result.bytes())
        first, last = result.range
        if first != start or len(data) != last - first:
            raise Transient(f"the server sent {len(data)} bytes from {first} to {last}")
        return data, result.meta["size"]

    async def size(self, key: str) -> int | None:
        keys.check_fixed(key)
        try:
            meta = await self._call(lambda _: self._reader.head(key), f"look at {key}")
        except Missing:
            return None
        return meta["size"]

    async def write(self, key: str, source: bytes | Path) -> bool:
        keys.check_fixed(key)
        size = size_of(source)
        if size > SINGLE_PUT or not self._creates:
            found = await self.size(key)
            if found is not None:
                return _same_size(key, found, size)
        async with self._uploads:
            if size > SINGLE_PUT:
                new = await self._put_parts(key, source, size)
            else:
                new = await self._put_whole(key, source, size)
        found = size if new and size <= SINGLE_PUT else await self.size(key)
        return _same_size(key, found, size) or new

    async def _put_whole(self, key: str, source: bytes | Path, size: int) -> bool:
        data = source if isinstance(source, bytes) else await asyncio.to_thread(source.read_bytes)
        if len(data) != size:
            raise InvalidArgument(f"{source!s} changed while it was read", field="source")
        tries = 0
        client = self._writer if size <= SMALL_PUT else self._bulk

        def put(_: Call) -> None:
            nonlocal tries
            tries += 1
            mode: PutMode = "create" if self._creates else "overwrite"
            client.put(key, data, mode=mode, use_multipart=False)

        try:
            await self._call(put, f"write {key}", size)
        except Exists:
            return tries > 1  # the try before may have got through without its answer
        except Missing:
            raise self._no_bucket() from None
        return True

    async def _put_parts(self, key: str, source: bytes | Path, size: int) -> bool:
        def put(_: Call) -> None:
            self._bulk.put(
                key, source, use_multipart=True, chunk_size=PART, max_concurrency=PARALLEL_PARTS
            )

        try:
            await self._call(put, f"write {key}", size)
        except Missing:
            raise self._no_bucket() from None
        return True

    async def delete(self, key: str) -> None:
        await self._delete(keys.check_deletable(key))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        keys.check_prefix(prefix)
        hidden = record.SIZE_DELETED if prefix in keys.MOVING else -1
        last: str | None = None
        while True:
            offset = last

            def page(_: Call, offset: str | None = offset) -> Sequence[Entry]:
                for metas in self._reader.list(prefix, offset=offset, chunk_size=PAGE):
                    return [
                        Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())
                        for meta in metas
                    ]
                return []

            entries = await self._call(page, f"list {prefix}")
            for entry in entries:
                with contextlib.suppress(InvalidArgument):  # not ours
                    if entry.size > hidden:
                        size = entry.size - max(hidden, 0)
                        yield Entry(keys.check(entry.key), size, entry.modified)
            if len(entries) < PAGE:
                return
            last = entries[-1].key

    def source(self, key: str) -> Source:
        return Source(
            kind="http",
            url=self._place.url(keys.check_fixed(key)),
            region=self._place.region,
            credentials=self._who.kind,
            credentials_file=self._who.file,
            profile=self._who.profile,
            ca_file=self._options.ca_file,
        )

    async def tidy(self) -> None:
        """Parts of uploads go by the bucket's lifecycle rule."""

    async def close(self) -> None:
        self._workers.close()
        del self._reader, self._writer, self._bulk  # and their connections

    # --- names ------------------------------------------------------------------------------

    async def read_name(self, key: str) -> tuple[bytes, str] | None:
        keys.check_moving(key)
        current, _ = await self._call(lambda _: self._record(key), f"read {key}")
        return (current.data, current.version) if current and current.data else None

    async def swap_name(self, key: str, data: bytes | None, expected: str | None) -> str:
        keys.check_moving(key)
        wanted = record.new(data)
        what = f"move {key}"
        if self._swaps:
            await self._call(self._swap(key, wanted, expected), what)
        elif self._options.single_writer:
            async with self._single:
                await self._call(self._swap(key, wanted, expected), what)
        else:
            raise Unsupported(
                f"cannot {what} at {self._place}: {_NO_SWAP}; if this host is the only one that "
                "does, set store.options.single_writer = true",
                reason=_NO_SWAP,
            )
        return wanted.version

    def _swap(self, key: str, wanted: Record, expected: str | None) -> Callable[[Call], None]:
        unknown = 0  # puts that may have happened

        def step(call: Call) -> None:
            nonlocal unknown
            current, tag = self._record(key)
            if current is not None and current.version == wanted.version:
                return
            version = current.version if current is not None and current.data else None
            if version != expected:
                if unknown:
                    raise Unavailable(
                        f"{key} was moved by others while the server did not answer: whether our "
                        "move was before theirs is not known; read the name and decide",
                        key=key,
                    )
                raise Conflict(
                    f"{key} is {f'at version {version}' if version else 'not there'}, expected "
                    f"{f'version {expected}' if expected else 'none'}: somebody else moved it; "
                    "read it again",
                    key=key,
                )
            call.beat()
            unknown += 1
            try:
                body = record.encode(wanted)
                self._writer.put(key, body, mode=self._mode(tag), use_multipart=False)
            except BaseError as error:
                if isinstance(translate(error, "", ""), Exists):
                    unknown -= 1
                    raise Transient("it moves too often") from error  # the next step reads who won
                raise

        return step

    def _mode(self, tag: str | None) -> PutMode:
        if not self._swaps:
            return "overwrite"
        return {"e_tag": tag} if tag else "create"

    def _record(self, key: str) -> tuple[Record | None, str | None]:
        """Return record and ETag of a name; (None, None): there never was one.

        One that is damaged is read again once, then `Internal` is raised.
        """
        for last in (False, True):
            try:
                result = self._reader.get(key)
                body = bytes(result.bytes())
            except FileNotFoundError as error:
                if isinstance(translate(error, "", ""), Missing):
                    return None, None
                raise
            try:
                return record.decode(body), result.meta["e_tag"]
            except record.Damaged as error:
                if last:
                    raise Internal(
                        f"{key} at {self._place} is damaged: {error}; put back an older version of "
                        "the object, or delete it and set the name again",
                        key=key,
                    ) from error
        raise AssertionError

    # --- requests ---------------------------------------------------------------------------

    async def _put(self, key: str, data: bytes, mode: PutMode) -> None:
        def put(_: Call) -> None:
            self._writer.put(key, data, mode=mode, use_multipart=False)

        try:
            await self._call(put, "write")
        except Missing:
            raise self._no_bucket() from None

    async def _delete(self, key: str) -> None:
        with contextlib.suppress(Missing):
            await self._call(lambda _: self._reader.delete(key), f"delete {key}")

    async def _call(self, request: Callable[[Call], T], what: str, size: int = 0) -> T:
        """Return what `request` returns; again while it fails for a time.

        Raises `Missing`, `Exists`, `BeyondEnd`, or an error for the user.
        """
        patience = size / MIN_RATE

        async def attempt() -> T:
            try:
                async with asyncio.timeout(self._try_s + patience):
                    return await self._workers.run(request)
            except TimeoutError:
                raise Transient(f"no answer in {self._try_s + patience:.1f} s") from None
            except (BaseError, FileNotFoundError) as error:
                raise translate(error, what, str(self._place)) from error

        return await retry(attempt, f"cannot {what} at {self._place}", self._limit_s + patience)

    def _no_bucket(self) -> NotFound:
        return NotFound(f"{self._place}: no such bucket; check bucket and endpoint")


def _same_size(key: str, found: int | None, size: int) -> bool:
    """Return False: the object is there and has the right size. Raises `Internal` otherwise."""
    if found is None:
        raise Unavailable(f"{key} was deleted while it was written; write it again", key=key)
    if found != size:
        raise Internal(
            f"{key} has {found} bytes in the store instead of {size}: it is damaged; delete it",
            key=key,
        )
    return False


def _certificates(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}", field="ca_file") from error


async def open_s3(url: str, options: S3Options, environ: Mapping[str, str]) -> S3Store:
    """Return the store at ``s3://bucket/prefix``, tried out."""
    place = s3_options.place(url, options, environ)
    store = S3Store(place, s3_options.credentials(options, environ), options)
    try:
        await store.start()
    except BaseException:
        await store.close()
        raise
    return store

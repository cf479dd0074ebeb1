"""The S3 server for tests keeps S3's promises as far as other tests use them, and each fault happens as it is said."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from migrator.testing.errors import StandInError
from migrator.testing.s3_server import FULL, REGION, Answer, S3Server, User, signed, sockets, users, why_not
from tests.support.harness import DEADLINE_S, ROOT, until
from tests.support.tcp_faults import FaultyProxy

pytestmark = [pytest.mark.processes, pytest.mark.long]

BUCKET = "bucket"
MIB = 1 << 20
BLOCK = bytes(range(256)) * 4096
"""1 MiB in which every byte differs from its neighbours."""
LOST = (ConnectionError, http.client.HTTPException)
"""What a client without retries sees when its connection ends before the answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with an empty bucket. The second user reads; what it may do is in `test_a_user_may_do_only_...`."""
    why = why_not()
    if why is not None:
        pytest.skip(f"LOUD: {why}")
    with contextlib.closing(S3Server(tmp_path_factory.mktemp("s3"), users(f"Read:{BUCKET}", f"List:{BUCKET}"))) as made:
        made.start().make_bucket(BUCKET)
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[S3Server]:
    """A server of one test, not started yet."""
    why = why_not()
    if why is not None:
        pytest.skip(f"LOUD: {why}")
    with contextlib.closing(S3Server(tmp_path)) as made:
        yield made


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with contextlib.closing(FaultyProxy(server.port)) as made:
        yield made


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A path of its own for each test."""
    return f"/{BUCKET}/{request.node.name}/object"


def put(server: S3Server, key: str, body: bytes = b"bytes", **more: Any) -> Answer:
    return server.request("PUT", key, body=body, **more)


def get(server: S3Server, key: str, **more: Any) -> Answer:
    return server.request("GET", key, **more)


def begun(server: S3Server, key: str) -> str:
    """The id of a new multipart upload."""
    found = re.search(rb"<UploadId>(.+?)</UploadId>", server.request("POST", key, {"uploads": ""}).body)
    assert found is not None
    return found[1].decode()


def part(server: S3Server, key: str, upload: str, number: int, body: bytes) -> str:
    """Its etag."""
    return put(server, key, body, query={"partNumber": str(number), "uploadId": upload}).headers["etag"]


def finish(server: S3Server, key: str, upload: str, etags: list[str], **more: Any) -> Answer:
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in enumerate(etags, 1)
    )
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    return server.request("POST", key, {"uploadId": upload}, body=body, **more)


def pending(server: S3Server, prefix: str) -> set[str]:
    """The ids of the uploads that are neither finished nor aborted."""
    answer = server.request("GET", f"/{BUCKET}", {"uploads": "", "prefix": prefix})
    assert answer.status == 200
    return {found.decode() for found in re.findall(rb"<UploadId>(.+?)</UploadId>", answer.body)}


def listed(server: S3Server, prefix: str) -> list[str]:
    answer = server.request("GET", f"/{BUCKET}", {"list-type": "2", "prefix": prefix})
    assert answer.status == 200
    return [found.decode() for found in re.findall(rb"<Key>(.+?)</Key>", answer.body)]


def signed_put(server: S3Server, key: str, proxy: FaultyProxy, body: bytes) -> tuple[str, str]:
    """The target and the headers of a PUT, for a client that sends it in pieces."""
    host = f"127.0.0.1:{proxy.port}"
    target, fields = signed("PUT", key, {}, host=host, body=body, headers={}, user=server.users[0])
    fields["content-length"] = str(len(body))
    return target, "".join(f"{name}: {value}\r\n" for name, value in fields.items())


def is_running(pid: int) -> bool:
    """Not ended, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The server.


def test_a_client_library_writes_and_reads(server: S3Server) -> None:
    """obstore works with the server; a second exclusive PUT is refused with 412, which obstore calls AlreadyExists."""
    obstore = pytest.importorskip("obstore", reason="LOUD: obstore is missing, no library is tried with the S3 server")
    from obstore.store import S3Store

    full = server.users[0]
    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        region=REGION,
        access_key_id=full.key,
        secret_access_key=full.secret,
        client_options={"allow_http": True},
    )
    obstore.put(store, "library/small", b"first", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "library/small", b"second", mode="create")
    obstore.put(store, "library/large", BLOCK * 12, use_multipart=True, chunk_size=5 * MIB)

    assert bytes(obstore.get(store, "library/small").bytes()) == b"first"
    assert bytes(obstore.get_range(store, "library/large", start=5 * MIB - 3, end=5 * MIB + 3)) == bytes(
        [253, 254, 255, 0, 1, 2]
    )
    assert listed(server, "library/") == ["library/large", "library/small"]


def test_of_many_exclusive_puts_one_succeeds(server: S3Server, key: str) -> None:
    """`If-None-Match: *` lets one of several that come together write, and answers the others with 412."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda n: put(server, key, b"%d" % n, headers={"If-None-Match": "*"}).status, range(12))
        )

    assert Counter(answers) == {200: 1, 412: 11}
    assert get(server, key).body == b"%d" % answers.index(200)


def test_a_put_with_an_etag_replaces_only_that_object(server: S3Server, key: str) -> None:
    """`If-Match` lets a PUT replace what its writer has read, once; if there is nothing, it is refused as well."""
    etag = put(server, key, b"first").headers["etag"]

    assert put(server, key, b"second", headers={"If-Match": etag}).status == 200
    assert put(server, key, b"third", headers={"If-Match": etag}).code == "PreconditionFailed"
    assert put(server, f"{key}-2", headers={"If-Match": etag}).code == "PreconditionFailed"
    assert get(server, key).body == b"second"
    assert get(server, key, headers={"If-Match": etag}).status == 412


def test_an_upload_is_pending_until_it_is_finished_or_aborted(server: S3Server, key: str) -> None:
    """Pending uploads are listed, objects appear at the completion, and an aborted upload cannot be finished."""
    prefix = key.removeprefix(f"/{BUCKET}/")
    first, second = begun(server, key), begun(server, key)
    etags = [part(server, key, first, 1, BLOCK * 5), part(server, key, first, 2, b"tail")]
    late = part(server, key, second, 1, b"late")
    assert pending(server, prefix) == {first, second}
    assert listed(server, prefix) == []

    assert finish(server, key, first, etags, headers={"If-None-Match": "*"}).status == 200
    assert finish(server, key, second, [late], headers={"If-None-Match": "*"}).code == "PreconditionFailed"
    assert pending(server, prefix) == {second}
    assert server.request("DELETE", key, {"uploadId": second}).status == 204
    assert server.request("DELETE", key, {"uploadId": second}).status == 204
    assert finish(server, key, second, [late]).code == "NoSuchUpload"

    assert pending(server, prefix) == set()
    assert listed(server, prefix) == [prefix]
    assert get(server, key).body == BLOCK * 5 + b"tail"


def test_a_completion_that_is_repeated_succeeds_while_its_object_is_there(server: S3Server, key: str) -> None:
    """A client that lost the answer may ask again. An abort that comes late does no harm to the object."""
    upload = begun(server, key)
    etags = [part(server, key, upload, 1, BLOCK)]

    assert finish(server, key, upload, etags).body == finish(server, key, upload, etags).body
    assert server.request("DELETE", key, {"uploadId": upload}).status == 204
    assert get(server, key).body == BLOCK
    put(server, key, b"replaced")
    assert finish(server, key, upload, etags).code == "NoSuchUpload"
    assert get(server, key).body == b"replaced"


def test_what_is_wrong_is_refused_by_name(server: S3Server, key: str) -> None:
    """A bucket that is not there, one that is not empty, bytes that changed on their way, and a user's wrong key."""
    put(server, key)
    stranger = users()[0]

    assert put(server, "/no-such-bucket/object").code == "NoSuchBucket"
    assert server.request("DELETE", f"/{BUCKET}").code == "BucketNotEmpty"
    assert put(server, key, headers={"Content-MD5": "AAAAAAAAAAAAAAAAAAAAAA=="}).code == "BadDigest"
    assert get(server, key, user=stranger).code == "InvalidAccessKeyId"
    assert get(server, f"{key}-2").code == "NoSuchKey"
    assert get(server, key).body == b"bytes"


def test_a_user_may_do_only_what_it_was_allowed(server: S3Server, key: str, tmp_path: Path) -> None:
    """By actions, or by a policy, which tells writing from deleting."""
    put(server, key)
    reader = server.users[1]
    assert get(server, key, user=reader).body == b"bytes"
    assert put(server, key, user=reader).code == "AccessDenied"
    assert server.request("DELETE", key, user=reader).code == "AccessDenied"
    assert server.request("GET", f"/{BUCKET}", {"uploads": ""}, user=reader).status == 200

    names = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
    keeps = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject", "s3:ListBucket"], "Resource": names}
    with contextlib.closing(S3Server(tmp_path, users(policy=[keeps]))) as other:
        other.start().make_bucket(BUCKET)
        writer = other.users[1]
        assert put(other, f"/{BUCKET}/object", user=writer).status == 200
        assert other.request("DELETE", f"/{BUCKET}/object", user=writer).code == "AccessDenied"
        # The same server, and nobody else's: it does not know the keys of the first one.
        assert get(other, f"/{BUCKET}/object", user=server.users[0]).code == "InvalidAccessKeyId"
        assert get(other, key).code == "NoSuchKey"


def test_users_can_be_changed_while_the_server_runs(own: S3Server, key: str) -> None:
    """A user has other keys, and the old ones are refused at once."""
    own.start().make_bucket(BUCKET)
    full, before, after = own.users[0], User("job", FULL), User("job", FULL)
    own.change_users(full, before)
    assert put(own, key, user=before).status == 200
    own.change_users(full, after)
    assert put(own, key, user=before).code == "InvalidAccessKeyId"
    assert put(own, key, user=after).status == 200


def test_a_server_that_is_killed_has_kept_what_it_acknowledged(own: S3Server) -> None:
    """It starts again on its ports, and what was written or begun goes on. After the end nothing is left of it."""
    key = f"/{BUCKET}/object"
    own.start().make_bucket(BUCKET)
    put(own, key, BLOCK)
    upload = begun(own, f"{key}-2")
    etags = [part(own, f"{key}-2", upload, 1, BLOCK)]
    port, pid = own.port, own.pid

    own.kill()
    assert not is_running(pid)
    with pytest.raises(ConnectionRefusedError):
        get(own, key)
    starting = threading.Thread(target=own.start_again)  # it outlives the thread that starts it
    starting.start()
    starting.join(DEADLINE_S)

    assert own.port == port
    assert own.pid != pid
    assert get(own, key).body == BLOCK
    assert finish(own, f"{key}-2", upload, etags).status == 200
    assert get(own, f"{key}-2").body == BLOCK
    pid = own.pid
    assert any(path.exists() for path in sockets(port))
    own.close()
    assert not is_running(pid)
    assert not any(path.exists() for path in sockets(port))
    assert not own.directory.exists()


def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    """Also if that is killed, and could not end what it had started."""
    why = why_not()
    if why is not None:
        pytest.skip(f"LOUD: {why}")
    script = """
        import sys
        from pathlib import Path
        from migrator.testing.s3_server import S3Server

        server = S3Server(Path(sys.argv[1])).start()
        print(server.pid, server.port, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid, port = map(int, parent.stdout.readline().split())
        assert is_running(pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(DEADLINE_S)
    try:
        until(lambda: not is_running(pid), "the server to end with its parent", 10.0)
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
        for path in sockets(port):
            path.unlink(missing_ok=True)


def test_a_server_that_does_not_start_says_why(own: S3Server) -> None:
    """Its own last words are in the error, and it does not run any more."""
    with socket.create_server(("127.0.0.1", own.port)), pytest.raises(StandInError, match=f"(?s)ended.*{own.port}"):
        own.start()
    with pytest.raises(StandInError, match="does not run"):
        _ = own.pid


# The proxy.


def test_without_faults_all_is_carried_and_counted(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """The server accepts the signature of a client that knows only the proxy; requests are counted by method."""
    assert put(server, key, BLOCK * 3, port=proxy.port).status == 200
    assert get(server, key, port=proxy.port).body == BLOCK * 3
    assert get(server, key, port=proxy.port, headers={"Range": "bytes=255-257"}).body == b"\xff\x00\x01"
    assert server.request("HEAD", key, port=proxy.port).headers["content-length"] == str(3 * MIB)
    assert server.request("DELETE", key, port=proxy.port).status == 204
    assert get(server, key, port=proxy.port).code == "NoSuchKey"

    assert proxy.requests == {"PUT": 1, "GET": 3, "HEAD": 1, "DELETE": 1}
    assert proxy.connections == 6
    assert proxy.lines[0] == f"PUT {key}"
    assert not proxy.is_armed


def test_a_connection_carries_several_requests_in_chunks_too(server: S3Server, proxy: FaultyProxy) -> None:
    """Where a body ends is known by its length or by its chunks; the next request begins there."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        for _ in range(3):
            # Nobody signed this, so the server refuses it, after it has taken the body.
            connection.request(
                "PUT", f"/{BUCKET}/object", iter([b"some ", b"\r\n0\r\n\r\n", b"chunks"]), {}, encode_chunked=True
            )
            answer = connection.getresponse()
            assert answer.status == 403
            assert b"AccessDenied" in answer.read()

    assert proxy.requests == {"PUT": 3}
    assert proxy.connections == 1


def test_cut_ends_connections_and_refuses_new_ones(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """As where a server is gone. After `heal` it is there again, on the same port."""
    with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as idle:
        until(lambda: proxy.connections == 1, "the connection")
        proxy.cut()
        assert idle.recv(1) == b""
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            put(server, key, port=proxy.port)
    proxy.heal()
    assert put(server, key, port=proxy.port).status == 200


@pytest.mark.parametrize("least", [1, MIB])
def test_cut_ends_what_is_on_its_way(server: S3Server, proxy: FaultyProxy, key: str, least: int) -> None:
    """A PUT of which half has come leaves no object, and its client hears of the end at once."""
    proxy.slow(4 * MIB)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(put, server, key, BLOCK * 8, port=proxy.port)
        until(lambda: proxy.bytes_up >= least, "the request to begin")
        proxy.cut()
        with pytest.raises(LOST):
            writing.result(DEADLINE_S)
    assert get(server, key).code == "NoSuchKey"


def test_a_client_that_ends_behind_its_head_leaves_nothing(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """The server hears a reset instead of an orderly end, so it does not take the body for an empty one."""
    put(server, key, b"whole")
    target, fields = signed_put(server, key, proxy, BLOCK)
    with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as client:
        client.sendall(f"PUT {target} HTTP/1.1\r\n{fields}\r\n".encode())
        until(lambda: proxy.bytes_up, "the head to arrive")
    until(lambda: not proxy.open_connections, "the end to be passed on")
    assert get(server, key).body == b"whole"


def test_reset_after_so_many_bytes(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """The client sees a reset, the server half a body, of which it keeps nothing; the next request succeeds."""
    put(server, key, b"whole")
    proxy.reset_after(MIB // 2)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        put(server, key, BLOCK * 8, port=proxy.port)

    assert not proxy.is_armed
    assert get(server, key, port=proxy.port).body == b"whole"
    assert put(server, key, BLOCK, port=proxy.port).status == 200


def test_reset_of_the_nth_connection(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """Those before it and behind it are left alone."""
    put(server, key, BLOCK, port=proxy.port)
    proxy.reset_after(100, connection=2)

    assert get(server, key, port=proxy.port).status == 200
    with pytest.raises(ConnectionResetError) as caught:
        get(server, key, port=proxy.port)
    assert caught.type is ConnectionResetError  # an orderly end is a subclass of it
    assert get(server, key, port=proxy.port).status == 200


def test_what_was_sent_into_a_stall_acts_when_it_is_over(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """A client that gives up may have written all the same, later: the case that breaks naive retries."""
    proxy.stall()
    with pytest.raises(TimeoutError):
        put(server, key, b"given up", port=proxy.port, timeout_s=0.2)
    assert proxy.requests == {}
    assert get(server, key).code == "NoSuchKey"

    proxy.heal()
    until(lambda: get(server, key).body == b"given up", "the request to act late")


def test_a_stall_holds_what_was_on_its_way(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """Also in the middle of a body; after `heal` the same request succeeds."""
    proxy.slow(4 * MIB)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(put, server, key, BLOCK * 8, port=proxy.port)
        until(lambda: proxy.requests["PUT"], "the request to begin")
        proxy.stall()
        with pytest.raises(TimeoutError):
            writing.result(0.2)
        proxy.heal()
        assert writing.result(DEADLINE_S).status == 200
    assert get(server, key).body == BLOCK * 8


def test_slow_lets_so_many_bytes_through_in_a_second(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """In both directions. A megabyte at 4 MiB/s takes a quarter of a second."""
    proxy.slow(4 * MIB)
    for method, body in (("PUT", BLOCK), ("GET", b"")):
        start_s = time.monotonic()
        assert server.request(method, key, body=body, port=proxy.port).status == 200
        assert 0.24 <= time.monotonic() - start_s < DEADLINE_S / 2


def test_503_is_answered_in_place_of_the_server(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """So often as it was asked for, whatever the request; a connection goes on after it, and the server saw nothing."""
    proxy.answer_503(3)
    refused = put(server, key, BLOCK * 4, port=proxy.port)
    assert (refused.status, refused.code) == (503, "SlowDown")
    assert server.request("HEAD", key, port=proxy.port).status == 503
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        statuses = []
        for _ in range(2):
            connection.request("PUT", key, BLOCK)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
    assert statuses == [503, 403]  # the second reached the server, unsigned as it is

    assert not proxy.is_armed
    assert get(server, key).code == "NoSuchKey"
    assert proxy.requests == {"PUT": 3, "HEAD": 1}


def test_a_store_that_does_not_know_conditions(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """A PUT with one is refused, and nothing else."""
    proxy.refuse_conditions()
    for condition in ({"If-None-Match": "*"}, {"If-Match": "0"}):
        refused = put(server, key, headers=condition, port=proxy.port)
        assert (refused.status, refused.code) == (501, "NotImplemented")
    assert put(server, key, port=proxy.port).status == 200
    etag = get(server, key).headers["etag"]
    assert get(server, key, headers={"If-Match": etag}, port=proxy.port).status == 200
    proxy.heal()
    assert put(server, key, headers={"If-None-Match": "*"}, port=proxy.port).status == 412


def test_a_clock_that_is_moved(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """The date of each answer, and nothing else of it."""
    put(server, key, BLOCK)
    dates = []
    for by_s in (0.0, 3600.0, -3600.0):
        proxy.move_clock(by_s)
        answer = get(server, key, port=proxy.port)
        assert answer.body == BLOCK
        dates.append(email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp())
    assert dates[1] - dates[0] == pytest.approx(3600, abs=5)
    assert dates[2] - dates[0] == pytest.approx(-3600, abs=5)


def test_503_for_a_client_that_asks_before_it_sends(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """`Expect: 100-continue`, as botocore sends: it is refused without its body, and told to make a new connection."""
    proxy.answer_503()
    head = f"PUT {key} HTTP/1.1\r\nHost: x\r\nContent-Length: {MIB}\r\nExpect: 100-continue\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as client:
        client.sendall(head)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))

    assert answer.startswith(b"HTTP/1.1 503 Slow Down\r\n")
    assert b"Connection: close" in answer
    assert b"<Code>SlowDown</Code>" in answer


def test_a_server_that_tells_a_client_to_go_on(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """An answer to `Expect: 100-continue` is passed on, and is not taken for the answer to the request."""
    target, fields = signed_put(server, key, proxy, BLOCK)
    head = f"PUT {target} HTTP/1.1\r\n{fields}expect: 100-continue\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as client:
        for _ in range(2):
            client.sendall(head)
            assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(BLOCK)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
    assert proxy.requests == {"PUT": 2}
    assert get(server, key).body == BLOCK


def test_truncated_get(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """The headers promise more than what arrives. Lists and smaller objects are left alone."""
    put(server, key, BLOCK)
    put(server, f"{key}-2", b"small")
    proxy.truncate_next_get(100)

    assert server.request("GET", f"/{BUCKET}", {"list-type": "2"}, port=proxy.port).status == 200
    assert get(server, f"{key}-2", port=proxy.port).body == b"small"
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(server, key, port=proxy.port)
    assert caught.value.partial == BLOCK[:100]
    assert get(server, key, port=proxy.port).body == BLOCK


def test_corrupt_get(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """One bit of one byte differs, in the middle, and nothing else says so."""
    put(server, key, BLOCK)
    proxy.corrupt_next_get()
    answer = get(server, key, port=proxy.port)

    assert answer.status == 200
    assert len(answer.body) == MIB
    changed = [at for at in range(MIB) if answer.body[at] != BLOCK[at]]
    assert changed == [MIB // 2]
    assert (answer.body[MIB // 2] ^ BLOCK[MIB // 2]).bit_count() == 1
    assert get(server, key, port=proxy.port).body == BLOCK


def test_dropped_answer(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """The server has acted and its client does not know. Requests that do not match are answered."""
    proxy.drop_next_answer(r"PUT .*/object-2$")
    assert put(server, key, b"first", port=proxy.port, headers={"If-None-Match": "*"}).status == 200
    with pytest.raises(http.client.RemoteDisconnected):
        put(server, f"{key}-2", BLOCK, port=proxy.port, headers={"If-None-Match": "*"})
    assert not proxy.is_armed
    assert put(server, f"{key}-2", BLOCK, port=proxy.port, headers={"If-None-Match": "*"}).status == 412
    assert get(server, f"{key}-2").body == BLOCK

    upload = begun(server, f"{key}-3")
    etags = [part(server, f"{key}-3", upload, 1, BLOCK)]
    proxy.drop_next_answer(r"POST .*uploadId=")
    with pytest.raises(http.client.RemoteDisconnected):
        finish(server, f"{key}-3", upload, etags, port=proxy.port)
    assert get(server, f"{key}-3").body == BLOCK
    assert finish(server, f"{key}-3", upload, etags, port=proxy.port).status == 200


def test_heal_takes_back_what_has_not_happened(server: S3Server, proxy: FaultyProxy, key: str) -> None:
    """All faults together, and none of them after `heal`."""
    proxy.reset_after(1)
    proxy.answer_503(5)
    proxy.truncate_next_get(1)
    proxy.corrupt_next_get()
    proxy.drop_next_answer("")
    proxy.slow(1)
    proxy.stall()
    proxy.cut()
    proxy.heal()

    assert not proxy.is_armed
    assert put(server, key, BLOCK, port=proxy.port).status == 200
    assert get(server, key, port=proxy.port).body == BLOCK


def test_the_proxy_passes_on_that_the_server_is_gone(own: S3Server) -> None:
    """A server that is killed is lost for clients of the proxy too, and found again when it is back."""
    own.start().make_bucket(BUCKET)
    key = f"/{BUCKET}/object"
    with contextlib.closing(FaultyProxy(own.port)) as proxy:
        put(own, key, port=proxy.port)
        own.kill()
        with pytest.raises(LOST):
            get(own, key, port=proxy.port)
        own.start_again()
        assert get(own, key, port=proxy.port).body == b"bytes"


def test_close_ends_all_threads(server: S3Server, key: str) -> None:
    """Those that wait for bytes, for the end of a stall, and for a slow wire; it takes no time."""
    before = set(threading.enumerate())
    proxy = FaultyProxy(server.port)
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S))
        until(lambda: proxy.connections == 1, "the first connection")
        proxy.slow(1)
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S))
        slow.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: proxy.requests["GET"], "the slow request")
        proxy.stall()
        stalled = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S))
        stalled.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: proxy.connections == 3, "all connections")

        start_s = time.monotonic()
        proxy.close()
        assert time.monotonic() - start_s < 5.0
        assert set(threading.enumerate()) <= before
        for client in (idle, slow, stalled):
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    proxy.close()

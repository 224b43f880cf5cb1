"""What becomes of an upload or a download when the registry does what registries have done.

The server is written from the specification (tests/registry_server.py). Every case says what must be
in the registry at the end, what was sent, and how long the client waited.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from registry_cases import DATA, DIGEST, FULL, NAME, NOW, RECIPE, client
from registry_server import ALWAYS, FakeRegistry, Handler, serve, times

from ralbuild.errors import ImageError
from ralbuild.image.layers import WrongLayerError
from ralbuild.image.plan import LayerDigest
from ralbuild.image.registry.messages import Limits


@pytest.fixture
def registry():
    with serve() as made:
        yield made


def refuse(status: int, code: str = "FAULT", **headers: str):
    def act(handler: Handler) -> None:
        handler.body()
        handler.refuse(status, code, **headers)

    return act


def read_part_then(share: float, act=Handler.drop):
    def after(handler: Handler) -> None:
        handler.rfile.read(int(int(handler.headers["Content-Length"]) * share))
        act(handler)

    return after


def test_an_upload_is_one_head_one_post_and_one_put(registry: FakeRegistry) -> None:
    with client() as run:
        assert run.uploader(registry).put(RECIPE, DIGEST) == DIGEST.size
        assert run.uploader(registry).put(RECIPE, DIGEST) == 0
    assert [item.method for item in registry.seen] == ["HEAD", "POST", "PUT", "HEAD"]
    assert registry.blobs[FULL] == DATA
    assert run.pauses == []


def test_a_query_in_the_location_is_kept(registry: FakeRegistry) -> None:
    with client() as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    (put,) = (item for item in registry.seen if item.method == "PUT")
    assert "?state=a%2Fb&digest=sha256:" in put.path


@pytest.mark.parametrize("status", [202, 201, 204])
def test_chunks_are_sent_when_asked_for_whatever_success_is_called(status: int) -> None:
    """ECR answers 201 to PATCH (kitops issue 821)."""
    with serve(patch_status=status) as registry, client() as run:
        assert run.uploader(registry, chunk_size=1_000_000).put(RECIPE, DIGEST) == DIGEST.size
        patches = [item.size for item in registry.seen if item.method == "PATCH"]
        assert patches == [1_000_000, 1_000_000, 1_000_000, len(DATA) - 3_000_000]
        assert registry.blobs[FULL] == DATA


def test_a_chunk_is_at_least_as_long_as_the_registry_wants(registry: FakeRegistry) -> None:
    def wide(handler: Handler) -> None:
        handler.registry.sessions["w"] = bytearray()
        handler.answer(202, Location=f"/v2/{NAME}/blobs/uploads/w", OCI_Chunk_Min_Length="2000000")

    registry.faults.append(times(1, "POST", "uploads", wide))
    with client() as run:
        run.uploader(registry, chunk_size=1000).put(RECIPE, DIGEST)
    assert [item.size for item in registry.seen if item.method == "PATCH"] == [
        2_000_000,
        len(DATA) - 2_000_000,
    ]
    assert registry.blobs[FULL] == DATA


@pytest.mark.parametrize("status", [400, 404, 405, 413, 415, 501])
def test_a_registry_that_rejects_chunks_gets_the_blob_whole(registry: FakeRegistry, status: int) -> None:
    """Google's refuses chunked uploads (kitops issue 777)."""
    registry.faults.append(times(ALWAYS, "PATCH", "", refuse(status)))
    with client() as run:
        assert run.uploader(registry, chunk_size=1_000_000).put(RECIPE, DIGEST) == DIGEST.size
    assert registry.blobs[FULL] == DATA
    assert registry.count("PATCH") == 1
    assert run.pauses == []


def test_a_body_that_is_too_large_is_sent_in_chunks(registry: FakeRegistry) -> None:
    """A proxy that takes 64 MiB at most; here, anything but an empty PUT is too much."""

    def too_large(handler: Handler) -> bool:
        if handler.command != "PUT" or not int(handler.headers["Content-Length"]):
            return False
        handler.close_connection = True
        handler.refuse(413, "SIZE_INVALID")  # without reading the body, as proxies do
        return True

    registry.faults.append(too_large)
    with client() as run:
        assert run.uploader(registry).put(RECIPE, DIGEST) == DIGEST.size
    assert registry.blobs[FULL] == DATA


def test_a_body_that_is_too_large_for_a_registry_without_chunks_is_an_error(registry: FakeRegistry) -> None:
    registry.faults.append(times(ALWAYS, "PUT", "", refuse(413)))
    with client(profile="harbor") as run, pytest.raises(ImageError, match="413") as caught:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert caught.value.exit_code == 6
    assert "--reshard" in caught.value.problems[0].hint
    assert FULL not in registry.blobs


def test_a_connection_lost_at_60_percent_is_taken_up_from_the_blob_s_start(registry: FakeRegistry) -> None:
    registry.faults.append(times(2, "PUT", "", read_part_then(0.6)))
    with client() as run:
        assert run.uploader(registry).put(RECIPE, DIGEST) == DIGEST.size
    assert registry.blobs[FULL] == DATA
    assert registry.count("HEAD") == 3, "a blob may have arrived although its answer was lost"
    assert run.pauses == [1.0, 2.0]


def test_progress_takes_back_what_a_failed_attempt_had_sent(registry: FakeRegistry) -> None:
    registry.faults.append(times(1, "PUT", "", read_part_then(0.6)))
    steps: list[int] = []
    with client() as run:
        uploader = run.uploader(registry)
        uploader._progress = steps.append
        uploader.put(RECIPE, DIGEST)
    assert sum(steps) == DIGEST.size
    assert min(steps) < 0


def test_a_connection_that_is_always_lost_ends_with_an_error(registry: FakeRegistry) -> None:
    registry.faults.append(times(ALWAYS, "PUT", "", read_part_then(0.6)))
    with client() as run, pytest.raises(ImageError, match="gave up after 4 attempts") as caught:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert caught.value.exit_code == 6
    assert run.pauses == [1.0, 2.0, 4.0]
    assert FULL not in registry.blobs


def test_an_answer_that_was_lost_after_the_commit_costs_no_second_upload(registry: FakeRegistry) -> None:
    def commit_then_drop(handler: Handler) -> None:
        handler.registry.add_blob(NAME, handler.body())
        handler.drop()

    registry.faults.append(times(1, "PUT", "", commit_then_drop))
    with client() as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert registry.count("PUT") == 1


def test_retry_after_is_obeyed_in_seconds_and_as_a_date(registry: FakeRegistry) -> None:
    date = datetime.fromtimestamp(NOW + 30, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    registry.faults.append(times(1, "POST", "", refuse(429, Retry_After="7")))
    registry.faults.append(times(1, "POST", "", refuse(429, Retry_After=date)))
    registry.faults.append(times(1, "PUT", "", refuse(429, Retry_After="3")))
    with client() as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert run.pauses == [7.0, 30.0, 3.0]
    assert registry.blobs[FULL] == DATA


def test_a_registry_that_asks_for_too_much_patience_is_an_error(registry: FakeRegistry) -> None:
    registry.faults.append(times(ALWAYS, "POST", "", refuse(429, Retry_After="9999")))
    with client() as run, pytest.raises(ImageError, match="come back in 9999 seconds"):
        run.uploader(registry).put(RECIPE, DIGEST)
    assert run.pauses == []


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT"])
def test_a_server_error_is_tried_again(registry: FakeRegistry, method: str, status: int) -> None:
    registry.faults.append(times(2, method, "", refuse(status)))
    with client() as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert registry.blobs[FULL] == DATA
    assert run.pauses == [1.0, 2.0]


def test_an_error_names_what_the_registry_said(registry: FakeRegistry) -> None:
    registry.faults.append(times(ALWAYS, "POST", "", refuse(403, "DENIED")))
    with client() as run, pytest.raises(ImageError, match="403: DENIED denied") as caught:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert "docker login" in caught.value.problems[0].hint
    assert run.pauses == []


def test_bytes_of_an_upload_to_another_host_come_without_credentials() -> None:
    with serve() as other, serve(auth="basic", upload_host=other.url) as registry:
        with client() as run, pytest.MonkeyPatch.context() as patch:
            patch.setattr("ralbuild.image.registry.auth.find_credentials", lambda _: credentials())
            other.sessions |= {f"s0-{number}": bytearray() for number in range(9)}
            other.faults.append(lambda handler: handler.registry.linked.clear() is not None)
            uploader = run.uploader(registry)
            uploader.put(RECIPE, DIGEST)
        assert other.blobs[FULL] == DATA
        assert {item.authorization for item in other.seen} == {""}
        assert any(item.authorization.startswith("Basic ") for item in registry.seen)


def credentials():
    from ralbuild.image.registry.credentials import Credentials

    return Credentials("user", "secret")


def test_a_download_that_is_redirected_elsewhere_comes_without_credentials() -> None:
    with serve() as other, serve(auth="basic") as registry:
        other.add_blob(NAME, DATA)
        registry.add_blob(NAME, DATA)
        away = times(
            ALWAYS, "GET", "blobs", lambda h: h.answer(307, Location=f"{other.url}/v2/{NAME}/blobs/{FULL}")
        )
        registry.faults.append(away)
        with client() as run, pytest.MonkeyPatch.context() as patch:
            patch.setattr("ralbuild.image.registry.auth.find_credentials", lambda _: credentials())
            assert b"".join(run.repository(registry).read_blob(FULL, len(DATA))) == DATA
        assert [item.authorization for item in other.seen] == [""]


@pytest.mark.parametrize(
    ("location", "wording"),
    [
        ("http://r.example.test/v2/x", "without TLS, at r.example.test:80"),
        ("ftp://127.0.0.1/x", "a Location that is none"),
        ("https://user:pw@127.0.0.1/x", "a Location that is none"),
        ("http://127.0.0.1:1/\tx", "a Location that is none"),
    ],
)
def test_a_location_that_nobody_should_follow_is_an_error(
    registry: FakeRegistry, location: str, wording: str
) -> None:
    registry.faults.append(times(ALWAYS, "POST", "", lambda handler: handler.answer(202, Location=location)))
    with client() as run, pytest.raises(ImageError, match=wording):
        run.uploader(registry).put(RECIPE, DIGEST)


def test_redirects_without_end_are_an_error(registry: FakeRegistry) -> None:
    registry.faults.append(lambda handler: handler.answer(307, Location=handler.path) is None)
    with client() as run, pytest.raises(ImageError, match="redirects more than 5 times"):
        run.repository(registry).get_manifest("v1")


def test_a_redirected_upload_is_sent_again_to_the_new_place(registry: FakeRegistry) -> None:
    def move(handler: Handler) -> None:
        handler.body()
        handler.answer(307, Location=handler.path + "&moved=1")

    registry.faults.append(times(1, "PUT", "", move))
    with client() as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert registry.blobs[FULL] == DATA


def test_a_token_that_runs_out_is_asked_for_anew() -> None:
    with (
        serve(auth="bearer", token_uses=1) as registry,
        client() as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("ralbuild.image.registry.auth.find_credentials", lambda _: credentials())
        run.uploader(registry).put(RECIPE, DIGEST)
        assert registry.blobs[FULL] == DATA
        assert len(registry.issued) == 3
        assert run.pauses == []
        assert {tuple(scopes) for scopes in registry.issued} == {(f"repository:{NAME}:pull,push",)}


def test_a_token_that_runs_out_in_an_upload_costs_one_more_attempt() -> None:
    with (
        serve(auth="bearer") as registry,
        client() as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("ralbuild.image.registry.auth.find_credentials", lambda _: credentials())
        expired = times(1, "PATCH", "", lambda h: (h.registry.tokens.clear(), h.dispatch()))
        registry.faults.append(expired)
        run.uploader(registry, chunk_size=1_000_000).put(RECIPE, DIGEST)
        assert registry.blobs[FULL] == DATA
        assert run.pauses == [1.0]


def test_a_registry_that_stored_something_else_is_an_error(registry: FakeRegistry) -> None:
    wrong = "sha256:" + "0" * 64
    registry.faults.append(
        times(ALWAYS, "PUT", "", lambda h: (h.body(), h.answer(201, Docker_Content_Digest=wrong)))
    )
    with client() as run, pytest.raises(ImageError, match="stored another blob"):
        run.uploader(registry).put(RECIPE, DIGEST)


def test_bytes_that_were_damaged_on_the_way_are_sent_again(registry: FakeRegistry) -> None:
    registry.faults.append(times(1, "PUT", "", refuse(400, "DIGEST_INVALID")))
    with client() as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert registry.blobs[FULL] == DATA


def test_a_file_that_is_not_what_its_digest_says_is_our_mistake_not_the_registry_s(
    registry: FakeRegistry,
) -> None:
    with client() as run, pytest.raises(WrongLayerError, match="changed while the image was being built"):
        run.uploader(registry).put(RECIPE, LayerDigest("0" * 64, DIGEST.size))
    assert registry.blobs == {}


def test_a_slow_loris_is_left_after_the_time_limit(registry: FakeRegistry) -> None:
    """One byte now and then resets every socket timeout; the answer as a whole has one too."""

    def trickle(handler: Handler) -> bool:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 9:
            try:
                handler.wfile.write(bytes([byte]))
                time.sleep(0.02)
            except OSError:
                break
        handler.close_connection = True
        return True

    registry.faults.append(trickle)
    limits = Limits(connect=5, idle=5, reply=0.1, stored=5)
    with client(limits) as run, pytest.raises(ImageError, match="gave up after 4 attempts"):
        run.repository(registry).has_blob(FULL, 1)


def test_a_download_that_trickles_is_left(registry: FakeRegistry) -> None:
    def trickle(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(DATA)))
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x")
                time.sleep(0.02)
        except OSError:
            handler.close_connection = True
        return True

    registry.faults.append(trickle)
    limits = Limits(connect=5, idle=0.1, reply=5, stored=5)
    with client(limits) as run, pytest.raises(ImageError, match="gave up after 4 attempts"):
        b"".join(run.repository(registry).read_blob(FULL, len(DATA)))


@pytest.mark.parametrize(
    ("sent", "wording"),
    [
        (DATA[:-1] + b"!", "is damaged"),
        (DATA + b"!", "needs 3072000 bytes, the registry has 3072001"),
        (DATA[:-1], "needs 3072000 bytes, the registry has 3071999"),
        (b"", "needs 3072000 bytes, the registry has 0"),
    ],
)
def test_a_blob_that_is_not_what_was_asked_for_is_never_taken(
    registry: FakeRegistry, sent: bytes, wording: str
) -> None:
    registry.faults.append(times(ALWAYS, "GET", "blobs", lambda handler: handler.answer(200, sent)))
    with client() as run, pytest.raises(ImageError, match=wording):
        b"".join(run.repository(registry).read_blob(FULL, len(DATA)))


def test_a_broken_download_goes_on_where_it_broke(registry: FakeRegistry) -> None:
    registry.add_blob(NAME, DATA)

    def half(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(DATA)))
        handler.end_headers()
        handler.wfile.write(DATA[:1_000_000])
        handler.wfile.flush()
        handler.drop()

    registry.faults.append(times(1, "GET", "blobs", half))
    ranges: list[str] = []
    registry.faults.append(lambda handler: ranges.append(handler.headers.get("Range", "")) is not None)
    with client() as run:
        assert b"".join(run.repository(registry).read_blob(FULL, len(DATA))) == DATA
    assert ranges[-1].startswith("bytes=")
    assert 0 < int(ranges[-1][6:-1]) <= 1_000_000


def test_a_registry_without_ranges_is_read_from_its_start_again(registry: FakeRegistry) -> None:
    sent = [DATA[:500_000], DATA]

    def act(handler: Handler) -> None:
        part = sent.pop(0)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(DATA)))
        handler.end_headers()
        handler.wfile.write(part)
        handler.wfile.flush()
        if len(part) < len(DATA):
            handler.drop()

    registry.faults.append(times(2, "GET", "blobs", act))
    with client() as run:
        assert b"".join(run.repository(registry).read_blob(FULL, len(DATA))) == DATA


def test_what_is_not_http_is_an_error(registry: FakeRegistry) -> None:
    registry.faults.append(lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n") and not handler.drop())
    with client() as run, pytest.raises(ImageError, match="gave up after 4 attempts") as caught:
        run.repository(registry).has_blob(FULL, 1)
    assert "SSH" not in str(caught.value) or "not HTTP" in str(caught.value)


def test_a_registry_that_is_not_there_is_an_error() -> None:
    with serve() as registry:
        pass
    with client() as run, pytest.raises(ImageError, match="connection refused; gave up"):
        run.repository(registry).has_blob(FULL, 1)


def test_a_registry_may_work_on_an_upload_longer_than_it_may_pause_otherwise(registry: FakeRegistry) -> None:
    """Registries hash or move the whole blob before they answer the PUT."""

    def think(handler: Handler) -> bool:
        if handler.command == "PUT":
            time.sleep(0.6)
        return False

    registry.faults.append(think)
    with client(Limits(connect=5, idle=0.3, reply=5, stored=5)) as run:
        run.uploader(registry).put(RECIPE, DIGEST)
    assert registry.count("PUT") == 1
    assert run.pauses == []


def test_an_answer_that_trickles_before_the_end_of_its_connection_is_left(registry: FakeRegistry) -> None:
    def trickle(handler: Handler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        try:
            while True:
                handler.wfile.write(b" ")
                time.sleep(0.02)
        except OSError:
            handler.close_connection = True
        return True

    registry.faults.append(trickle)
    with client(Limits(connect=5, idle=5, reply=0.2, stored=5)) as run, pytest.raises(ImageError):
        run.repository(registry).get_manifest("sha256:" + "0" * 64)

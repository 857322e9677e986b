"""Whatever is encoded comes back equal; whatever is cut, changed or random is refused with a LinkError, never else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bimetal.engine.wire import api, handshake
from bimetal.engine.wire.frame import HEADER_BYTES, WIRE_VERSION, Header, Kind, unpack_header
from bimetal.engine.wire.step import (
    NO_TARGET,
    BiasEntries,
    PenaltyRows,
    Sampled,
    SamplingRows,
    Step,
    decode_sampled,
    decode_step,
    encode_sampled,
    encode_step,
)
from bimetal.errors import LinkError


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step that the scheduler could write, and many that it would not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    t, b, w = draw(st.integers(1, 20)), draw(st.integers(1, 8)), draw(st.integers(1, 5))
    r = draw(st.integers(0, t))

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(-5, 2**31 - 1, shape, dtype=np.int32)

    def floats(n: int) -> np.ndarray:
        return rng.standard_normal(n).astype(np.float32)

    sampling = (
        SamplingRows(floats(r), floats(r), ints(r), floats(r), floats(r)) if draw(st.booleans()) else None
    )
    penalties = bias = None
    if draw(st.booleans()):
        counts = rng.integers(0, 4, r)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        penalties = PenaltyRows(
            floats(r), floats(r), floats(r), ints(r), ints(r), starts, ints(int(starts[-1]))
        )
    if draw(st.booleans()):
        m = draw(st.integers(0, 6))
        bias = BiasEntries(ints(m), ints(m), floats(m))
    return Step(
        token_ids=ints(t),
        positions=ints(t),
        slots=ints(t),
        query_starts=ints(b + 1),
        context_lens=ints(b),
        block_tables=ints(b, w),
        sequence_slots=ints(b),
        logit_rows=ints(r),
        logit_sequences=ints(r),
        targets=np.where(ints(r) % 2 == 0, NO_TARGET, 7).astype(np.int32),
        num_decodes=draw(st.integers(0, b)),
        ids_lag=draw(st.integers(0, 9)),
        sampling=sampling,
        penalties=penalties,
        bias=bias,
        num_logprobs=ints(r) if draw(st.booleans()) else None,
        masked=ints(r) if draw(st.booleans()) else None,
    )


def assert_equal(a: object, b: object) -> None:
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


@given(steps())
def test_steps_come_back_equal(step: Step) -> None:
    assert_equal(decode_step(encode_step(step).tobytes()), step)


@given(steps(), st.data())
def test_cut_steps_are_refused(step: Step, data: st.DataObject) -> None:
    payload = encode_step(step).tobytes()
    with pytest.raises(LinkError):
        decode_step(payload[: data.draw(st.integers(0, len(payload) - 1))])


@given(st.binary(max_size=400))
def test_random_bytes_are_no_step(payload: bytes) -> None:
    for decode in (decode_step, decode_sampled):
        try:
            decode(payload)
        except LinkError:
            continue


@given(st.integers(0, 6), st.integers(-1, 4), st.integers(0, 2**32 - 1))
def test_sampled_comes_back_equal(r: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, r, dtype=np.int32)
    sampled = Sampled(ids)
    if k >= 0:
        tops = rng.integers(0, 1000, (r, k), dtype=np.int32)
        logprobs = rng.standard_normal((r, k)).astype(np.float32)
        sampled = Sampled(ids, rng.standard_normal(r).astype(np.float32), ids + 1, tops, logprobs)
    assert_equal(decode_sampled(encode_sampled(sampled).tobytes()), sampled)


@given(st.sampled_from(Kind), st.integers(0, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1))
def test_headers_come_back_equal(kind: Kind, num_bytes: int, step: int, micro_batch: int) -> None:
    header = Header(kind, num_bytes, epoch=3, step=step, micro_batch=micro_batch, flags=9)
    assert unpack_header(header.pack(), 2**41) == header


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: b"HTTP" + h[4:], "does not speak bimetal"),
        (
            lambda h: h[:4] + bytes([WIRE_VERSION + 1]) + h[5:],
            f"version {WIRE_VERSION + 1}, this process version",
        ),
        (lambda h: h[:5] + b"\xff" + h[6:], "unknown kind 255"),
        (lambda h: Header(Kind.STEP, 101).pack(), "101 bytes, the limit here is 100"),
    ],
)
def test_bad_headers_say_what_is_wrong(change: object, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        unpack_header(change(Header(Kind.STEP, 10).pack()), 100)  # type: ignore[operator]


@settings(max_examples=300)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_headers_are_refused(data: bytes) -> None:
    with pytest.raises(LinkError):
        unpack_header(data, 1 << 20)


def test_handshake_needs_the_same_secret_both_ways() -> None:
    ours, theirs = handshake.new_nonce(), handshake.new_nonce()
    hello = handshake.answer(handshake.challenge(ours), "s", "driver", theirs)
    who, welcome = handshake.accept(hello, "s", ours)
    assert who.role == "driver"
    handshake.confirm(welcome, "s", theirs)
    with pytest.raises(LinkError, match="secret differs"):
        handshake.accept(hello, "another", ours)
    with pytest.raises(LinkError, match="secret differs"):
        handshake.accept({**hello, "role": "gateway"}, "s", ours)  # the role is signed too
    with pytest.raises(LinkError, match="secret differs"):
        handshake.accept(hello, "s", handshake.new_nonce())  # an old hello is worth nothing
    with pytest.raises(LinkError, match="secret differs"):
        handshake.confirm(welcome, "s", handshake.new_nonce())
    with pytest.raises(LinkError, match="version 99"):
        handshake.accept({**hello, "version": 99}, "s", ours)


@pytest.mark.parametrize(
    "message",
    [
        api.Generate(
            "a", (1, 2), api.SamplingParams(logit_bias={3: -1.5}, stop_token_ids=(4,), seed=7), deadline_s=2.5
        ),
        api.Abort(("a", "b")),
        api.Outputs(
            (
                api.Output(
                    "a", (5,), (api.TokenLogprob(-0.5, 1, (5, 6), (-0.5, -1.0)),), finish_reason="length"
                ),
            )
        ),
        api.Ready("m", "/m", 10, 20, 3, 4, 5, (1,), ({"node": "n"},)),
        api.EngineStats(1, 2, 0.5, 0, 0, 0, 0, 0, 0, 1, (0.5, 0.25)),
        api.Loading(0, 1, 2),
        api.Fatal("why"),
    ],
)
def test_api_messages_come_back_equal(message: api.Message) -> None:
    frame = api.encode(message)
    header = unpack_header(frame[:HEADER_BYTES], 1 << 20)
    assert api.decode(header.kind, frame[HEADER_BYTES:]) == message


def test_api_names_the_field_at_fault() -> None:
    with pytest.raises(LinkError, match=r"GENERATE\.sampling\.max_tokens"):
        api.decode(
            Kind.GENERATE, b'{"request_id": "a", "prompt_token_ids": [1], "sampling": {"max_tokens": "x"}}'
        )
    with pytest.raises(LinkError, match="not JSON"):
        api.decode(Kind.ABORT, b"\xff\xfe")

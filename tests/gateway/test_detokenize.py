from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bimetal.gateway.detokenize import StopStream, Utf8Stream


def cut(data: str | bytes, places: list[int]) -> list:
    edges = [0, *sorted({min(place, len(data)) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def naive_stop(text: str, stops: list[str]) -> str | None:
    """Character by character: the first place where a stop string is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@given(st.text(), st.lists(st.integers(0, 40)))
def test_utf8_text_survives_any_cut(text: str, places: list[int]) -> None:
    stream = Utf8Stream()
    assert "".join(stream.push(piece) for piece in cut(text.encode(), places)) + stream.finish() == text


@given(st.binary(), st.lists(st.integers(0, 40)))
def test_broken_utf8_is_replaced_as_a_whole_would_be(data: bytes, places: list[int]) -> None:
    stream = Utf8Stream()
    pieces = [stream.push(piece) for piece in cut(data, places)]
    assert "".join(pieces) + stream.finish() == data.decode("utf-8", "replace")


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 40)),
)
def test_stop_strings_are_found_where_a_search_of_the_whole_text_finds_them(
    text: str, stops: list[str], places: list[int]
) -> None:
    stream = StopStream(stops)
    shown = ""
    for piece in cut(text, places):
        shown += stream.push(piece)
        # Nothing is ever taken back.
        assert text.startswith(shown)
    shown += stream.finish()
    expected = naive_stop(text, stops)
    assert shown == (text if expected is None else expected)
    assert (stream.match is not None) == (expected is not None)
    assert stream.num_released == len(shown)


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.lists(st.integers(0, 30)))
def test_text_that_cannot_become_a_stop_string_is_not_held_back(
    text: str, stop: str, places: list[int]
) -> None:
    stream = StopStream([stop])
    pushed = shown = ""
    for piece in cut(text, places):
        pushed += piece
        shown += stream.push(piece)
        if stream.match:
            break
        held = pushed[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_the_stop_string_itself_may_be_kept() -> None:
    stream = StopStream(["stop"], keep_stop=True)
    assert [stream.push("please st"), stream.push("op now"), stream.finish()] == ["please ", "stop", ""]


def test_exempt_text_neither_stops_nor_is_held() -> None:
    stream = StopStream(["ab"])
    assert stream.push("xabxa", exempt=True) == "xabxa"
    assert stream.push("b") == "b"
    assert stream.match is None

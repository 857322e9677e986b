"""How many biases a request may have: they travel with every step, to every stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bimetal.engine.wire.frame import MAX_CONTROL_BYTES
from bimetal.engine.wire.step import BiasEntries, encode_step, idle_step, max_biases
from bimetal.errors import RequestError
from bimetal.gateway.protocol import CompletionRequest
from bimetal.gateway.sampling import ModelLimits, build_sampling
from bimetal.gateway.text_model import SamplingDefaults


def test_more_biases_than_a_step_can_carry_are_refused() -> None:
    limits = ModelLimits(max_model_len=64, vocab_size=1000, max_biases=10)
    for num_biases in (10, 11):
        bias = {str(token): 1.0 for token in range(num_biases)}
        request = CompletionRequest(model="m", prompt="p", logit_bias=bias)
        if num_biases <= 10:
            sampling = build_sampling(request, SamplingDefaults(), limits, max_tokens=1, logprobs=None)
            assert len(sampling.logit_bias) == num_biases
        else:
            with pytest.raises(RequestError, match="logit_bias: 11 entries are more than the 10") as caught:
                build_sampling(request, SamplingDefaults(), limits, max_tokens=1, logprobs=None)
            assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("max_num_seqs", [64, 256, 1024])
def test_a_step_of_the_most_biases_is_no_longer_than_a_frame_may_be(max_num_seqs: int) -> None:
    """Two clients that biased every token of a large vocabulary could end an engine of 256 sequences."""
    one = BiasEntries(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32))
    bytes_of_one = encode_step(replace(idle_step(1), bias=one)).nbytes - encode_step(idle_step(1)).nbytes
    most_bytes = encode_step(idle_step(max_num_seqs)).nbytes + max_num_seqs * bytes_of_one * max_biases(
        max_num_seqs
    )
    assert MAX_CONTROL_BYTES / 3 < most_bytes < MAX_CONTROL_BYTES
    assert max_biases(max_num_seqs) >= 10_000

"""One stage from LOAD to its last step: weights, KV cache, runner, loop. Owns the torch objects; no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from bimetal.catalog.models import ModelSpec, load_model_spec
from bimetal.engine.device import TORCH_DTYPES, Device
from bimetal.engine.kernels.interface import Kernels
from bimetal.engine.kernels.torch_reference import TorchKernels
from bimetal.engine.stage.boundary import InputRing
from bimetal.engine.stage.checkpoint import Checkpoint, DummyWeights, Source, fingerprint
from bimetal.engine.stage.loop import Inputs, StageLoop, TokenPool
from bimetal.engine.stage.model import KvCache, StageModel
from bimetal.engine.stage.outbox import Outbox
from bimetal.engine.stage.runner import Runner, decode_buckets
from bimetal.engine.stage.sampler import Sampler
from bimetal.engine.stage.watch import StageWatch
from bimetal.engine.stage.weights import Progress, load_stage_weights
from bimetal.engine.wire.control import LoadStage, StageLoaded
from bimetal.engine.wire.options import KernelChoice
from bimetal.engine.wire.step import MAX_SCORED_TOKENS
from bimetal.errors import StageError
from bimetal.policy.step_times import TIMED_SIZES
from bimetal.units import GIB, format_bytes

_CPU_KV_CACHE_BYTES = GIB
_RING_BUFFERS = 4


def choose_kernels(device: Device, wanted: KernelChoice = "auto") -> Kernels:
    """`auto`: Triton's on a GPU, which must be one that they are listed for; torch's elsewhere."""
    if wanted == "triton" and not device.is_gpu:
        raise StageError("kernels are triton, but this stage's device is a CPU: use torch or auto, or a GPU")
    if wanted == "torch" or not device.is_gpu:
        return TorchKernels()
    from bimetal.engine.kernels.triton_kernels import TritonKernels, device_architecture

    return TritonKernels(device_architecture(device.torch_device))


class StageSession:
    """A loaded stage. `start` makes it run steps."""

    def __init__(self, load: LoadStage, progress: Progress) -> None:
        began = time.monotonic()
        self.load = load
        if load.num_threads is not None:
            torch.set_num_threads(load.num_threads)
        self.device = Device(load.device)
        self.spec: ModelSpec = load_model_spec(load.model)
        dtype = TORCH_DTYPES.get(load.dtype)
        if dtype is None:
            hint = (
                "; FP8 weights come from a checkpoint that is quantised so" if load.dtype == "float8" else ""
            )
            raise StageError(
                f"dtype {load.dtype!r} is not supported: use one of {', '.join(TORCH_DTYPES)}{hint}"
            )
        if not 0 <= load.start_layer < load.end_layer <= self.spec.num_layers:
            raise StageError(
                f"layers [{load.start_layer}, {load.end_layer}) are not in {self.spec.name}, which has {self.spec.num_layers}"
            )
        self.dtype = dtype
        self.is_first = load.start_layer == 0
        self.is_last = load.end_layer == self.spec.num_layers
        self.kernels = choose_kernels(self.device, load.kernels)
        source: Source
        if load.load_format == "dummy":
            source = DummyWeights(self.device.torch_device, dtype, load.seed, self.spec.quantization)
        else:
            source = Checkpoint(Path(load.model).expanduser(), self.spec.quantization)
        with torch.inference_mode():
            weights = load_stage_weights(
                self.spec,
                source,
                load.start_layer,
                load.end_layer,
                self.device.torch_device,
                dtype,
                progress,
                self.kernels,
            )
        self.model = StageModel(
            self.spec, load.start_layer, weights, self.kernels, load.max_model_len, self.device.torch_device
        )
        self.watch: StageWatch
        """Once it has started."""
        self.loaded = StageLoaded(
            weight_bytes=weights.num_bytes,
            bytes_read=source.bytes_read,
            max_kv_blocks=self._max_kv_blocks(),
            kv_block_bytes=self._kv_block_bytes,
            device=self.device.describe(),
            fingerprint={} if load.load_format == "dummy" else fingerprint(Path(load.model).expanduser()),
            load_s=time.monotonic() - began,
        )

    @property
    def largest_hidden_bytes(self) -> int:
        """Hidden states of the largest step."""
        return self.load.max_num_batched_tokens * self.spec.hidden_size * self.dtype.itemsize

    @property
    def _num_layers(self) -> int:
        return self.load.end_layer - self.load.start_layer

    @property
    def _kv_block_bytes(self) -> int:
        return self.load.block_tokens * self.spec.kv_bytes_per_token(self.load.dtype, self._num_layers)

    def _max_kv_blocks(self) -> int:
        """Blocks that fit; StageError if not even one sequence of max_model_len does."""
        load = self.load
        useful = load.max_num_seqs * -(-load.max_model_len // load.block_tokens)
        if load.kv_cache_bytes is not None:
            room_bytes = load.kv_cache_bytes
        elif self.device.is_gpu:
            room_bytes = self._gpu_kv_bytes()
        else:
            room_bytes = _CPU_KV_CACHE_BYTES
        blocks = min(room_bytes // self._kv_block_bytes, useful)
        needed = -(-load.max_model_len // load.block_tokens)
        if blocks < needed:
            raise StageError(
                f"stage {load.index} has room for {max(blocks, 0) * load.block_tokens} tokens of KV cache "
                f"({format_bytes(max(room_bytes, 0))}), but one request may have {load.max_model_len}: lower --max-model-len, "
                "raise --kv-cache-memory-bytes or --gpu-memory-utilization, or give the stage fewer layers"
            )
        return int(blocks)

    def _gpu_kv_bytes(self) -> int:
        """What the utilisation leaves beside weights and the activations of the largest step."""
        load = self.load
        self.device.synchronize()
        torch.cuda.empty_cache()  # what loading no longer needs
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device.torch_device)
        widest = max(
            2 * self.spec.intermediate_size,
            2 * self.spec.moe_intermediate_size * self.spec.experts_per_token,
            self.spec.query_size + 2 * self.spec.kv_size,
        )
        activation_bytes = (
            load.max_num_batched_tokens * (widest * 2 + 6 * self.spec.hidden_size) * self.dtype.itemsize
        )
        if self.is_last:
            rows = min(load.max_num_seqs + MAX_SCORED_TOKENS, load.max_num_batched_tokens)
            activation_bytes += 3 * 4 * rows * self.spec.vocab_size
        reserved_bytes = int(total_bytes * (1 - load.gpu_memory_utilization))
        return int(free_bytes - reserved_bytes - activation_bytes)

    def start(
        self,
        epoch: int,
        num_kv_blocks: int,
        join_edges: Callable[[], tuple[Inputs, Outbox]],
    ) -> tuple[StageLoop, dict[int, float]]:
        """The loop, and measured decode step times by row count. Edges are joined once the stage could run."""
        load = self.load
        cache = KvCache(
            self.spec,
            self._num_layers,
            num_kv_blocks,
            load.block_tokens,
            self.dtype,
            self.device.torch_device,
        )
        buckets = decode_buckets(load.max_num_seqs, self.device.is_gpu)
        sampler = Sampler(self.kernels, self.device, load.max_num_seqs) if self.is_last else None
        own_ids = sampler.pool if sampler is not None and self.is_first else None
        runner = Runner(
            self.model,
            cache,
            self.device,
            self.dtype,
            buckets,
            load.max_model_len,
            load.block_tokens,
            own_ids,
        )
        # Torch's experts wait for the host, which no graph can.
        if self.device.is_gpu and not load.enforce_eager and load.kernels != "torch":
            runner.capture()
        self.watch = StageWatch(self.model, runner, self.device, self.dtype)
        sizes = [n for n in TIMED_SIZES if n <= load.max_num_seqs]
        times = runner.warm_up(sizes)
        inputs, outbox = join_edges()
        row_shape, kind = ((), torch.int32) if self.is_first else ((self.spec.hidden_size,), self.dtype)
        ring = InputRing(self.device, _RING_BUFFERS, load.max_num_batched_tokens, row_shape, kind)
        pool = TokenPool(inputs.ids_in, load.max_num_seqs, epoch) if inputs.ids_in is not None else None
        loop = StageLoop(runner, sampler, self.device, inputs, ring, pool, epoch, outbox)
        return loop, times

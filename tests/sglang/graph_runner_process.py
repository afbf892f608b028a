"""SGLang's decode graph runner captures for each share, over a stand-in GPU.

Nothing can be computed there, so what a capture would run is left out; SGLang's loop over batch
sizes, its choice of the stream and its graph keys are its own. Prints what was captured as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as sgl

from windrow_sidecar import _core
from windrow_sidecar.engines.confined import GraphShares, disjoint_levels
from windrow_sidecar.engines.sglang.graphs import runner_class

SIZES = [1, 2]


class Bare(sgl.DecodeCudaGraphRunner):
    """SGLang's runner without what needs a model on a GPU."""

    def __init__(self) -> None:
        layer = torch.nn.Linear(1, 1)
        layer.alt_stream = "side"
        self.layer = layer
        self.model_runner = SimpleNamespace(
            model=torch.nn.Sequential(layer), device="cuda", gpu_id=0
        )
        self.attn_backend = SimpleNamespace(decode_cuda_graph_metadata={"page_table": "for all"})
        self.backend = SimpleNamespace(capture_session=lambda _stream: nullcontext())
        number = SimpleNamespace(fill_=lambda _value: None)
        self.buffers = SimpleNamespace(
            seq_lens=number, seq_lens_cpu=number, reset_index_buffers=lambda: None
        )
        self.capture_bs, self.compile_bs = SIZES, []
        self.captured_req_width, self.seq_len_fill_value = 1, 1
        self.enable_profile_cuda_graph = self.enable_torch_compile = False
        self.enable_pdmux = self.record_nolora_graph = False
        self.attention_graph_variants = None
        self.captured: list[dict] = []
        self.capture()

    def model_context(self):
        return nullcontext()

    def warmup(self) -> None:
        pass

    def capture_one_shape(self, size, _forward, *_labels) -> None:
        key = self._make_graph_key(size)
        plans = self.attn_backend.decode_cuda_graph_metadata
        self.captured.append(
            {
                "size": key.size,
                "share": key.stream_idx,
                "stream": self.stream,
                "side_stream": self.layer.alt_stream,
                "shared_plans": sorted(k for k in plans if isinstance(k, str)),
            }
        )
        plans[size] = f"plan of {size} for {key.stream_idx}"

    def load_batch(self, size: int) -> None:
        plans = self.attn_backend.decode_cuda_graph_metadata
        key = self._make_graph_key(size)
        self.replayed = {"share": key.stream_idx, "plan": plans[size]}


def main() -> None:
    _core.use_libcuda(sys.argv[1])

    @contextmanager
    def graph_capture(stream):
        yield SimpleNamespace(stream=stream)

    sgl.graph_capture = graph_capture
    sgl.get_available_gpu_memory = lambda *_args, **_kwargs: 0.0
    sgl.get_parallel = lambda: SimpleNamespace(tp_rank=1, tp_group=None)
    sgl.get_exec = lambda: SimpleNamespace(graph=SimpleNamespace(enable_cudagraph_gc=True))
    own = sgl.get_or_create_global_graph_capture_stream
    shares = GraphShares("cuda", as_stream=lambda stream: stream)
    runner = runner_class(Bare, shares)()
    assert sgl.get_or_create_global_graph_capture_stream is own
    replays = []
    for level in (*shares.levels(), shares.levels()[0]):
        shares.activate(level)
        runner.load_batch(2)
        replays.append(runner.replayed)
    print(
        json.dumps(
            {
                "levels": shares.levels(),
                "splits": [
                    [s.finetune_units, s.decode_units] for s in disjoint_levels(shares).splits
                ],
                "captured": runner.captured,
                "side_stream": runner.layer.alt_stream,
                "replays": replays,
            }
        )
    )


main()

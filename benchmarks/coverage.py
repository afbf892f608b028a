"""Count public deployments of SGLang of which the plugin's checks say that they harvest.

Example: python -m benchmarks.coverage --recipes srt-slurm/recipes --runtimes ome/config/runtimes

Both are folders of checkouts (NVIDIA/srt-slurm, sgl-project/ome); nothing of them is kept but
counts. A decode section says yes if `sglang.check_arguments` takes its command line, with a page
size as docs/sglang.md asks for; if the model's KV pool is one that is lent; and if its weights have
a codec. Runtimes of OME declare the model's architecture, which says the pool; one that the worker
is not held to PEFT for counts as no. Recipes of srt-slurm have no config.json: there the pool is
guessed from the model's name, and a name that says nothing counts as no.

What parallelism costs is shown in three steps: what the checks take; what has no more than plain
tensor parallelism within one node, the only kind that they could take next; and of this the models
that a worker over ranks trains.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import yaml

from benchmarks.harness import Result, arguments, environment, write
from windrow import sglang
from windrow.errors import UserError
from windrow_sidecar.engines.shard_cuts import ARCHITECTURES

_ALIASES = {
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "expert_parallel_size": "ep_size",
}
_PARALLEL = {
    **{"tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "nnodes": 1},
    "enable_dp_attention": False,
}
# How parallelism counts: not at all; as the checks have it; as if plain tensor parallelism in one
# node were taken; and as if it were taken of models that a worker over ranks trains.
Parallelism = Literal["ignored", "counted", "plain", "trained"]
_STEPS: tuple[tuple[Parallelism, str, float | None], ...] = (
    ("ignored", "ignoring parallelism", 0.6),
    ("counted", "counting parallelism", 0.3),
    ("plain", "if plain tensor parallelism within a node were taken", None),
    ("trained", "if it were taken of models that are trained over ranks", None),
)
# Weights as recipes name them, for which there is a codec (experts too), or which are plain.
_CODED = (
    *(
        "",
        "none",
        "bf16",
        "fp16",
        "fp8",
        "modelopt",
        "modelopt_fp8",
        "fp4",
        "nvfp4",
        "modelopt_fp4",
    ),
    *("mxfp4", "compressed-tensors", "gptq", "gptq_marlin", "awq", "awq_marlin"),
)
# By a model's architecture: its KV pool in SGLang. Each is one that the worker trains as PEFT does
# (tests/contract/test_served_architectures.py).
POOLS: dict[str, str] = {
    **{
        f"{name}ForCausalLM": "heads"
        for name in (
            *("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "Phi", "Phi3", "Cohere"),
            *("Gemma2", "Gemma3", "Glm", "Granite", "GraniteMoe", "Olmo2", "Olmoe", "Starcoder2"),
            *("StableLm", "Persimmon", "Arcee", "Ernie4_5_Moe", "GPTNeoX", "GPTJ", "MiniMaxM2"),
        )
    },
    **{f"{name}ForCausalLM": "latent" for name in ("DeepseekV2", "DeepseekV3", "MiniCPM3")},
    **{f"{name}ForCausalLM": "hybrid" for name in ("Qwen3Next", "NemotronH")},
    "GptOssForCausalLM": "windows",
}
# Served without a decode step, or with layers of other shapes than the architecture declares.
_NOT_AS_DECLARED = r"embed|gte|gme|bge|e5-|rerank|reward|nemotron-(ultra|super)"
# By what a model's name says, the first that fits: its KV pool, or "" where that is not lent.
_POOLS: tuple[tuple[str, str], ...] = (
    (r"deepseek-?v4|dsv4", ""),
    (r"v3[.-]?2|glm-?5", "indexed"),  # sparse attention keeps an index
    (r"qwen3[.-]?5|qwen3-next|nemotron-?(h|nano|3)|kimi-linear", "hybrid"),
    (r"minimax-?m2", "heads"),
    (r"gpt-oss", "windows"),  # those of layers that see all tokens
    (r"gemma-?(2|3-1b)", "heads"),  # one pool for all layers; larger ones of Gemma 3 see images
    (r"nemotron|llama-?4|gemma|mimo|minimax", ""),
    (r"embed|bge|gte|gme|e5-|rerank|vl|vision|whisper|ocr|audio", ""),
    (r"deepseek|dsr1|\br1\b|kimi", "latent"),
    (r"qwen[123]?|llama|mi[sx]tral|phi|granite|command|olmo|yi-|glm-?4", "heads"),
)


# Dense models that are trained over ranks (`engines.shard_cuts.ARCHITECTURES`), by their names.
_OVER_RANKS = r"qwen[23]?(\.5)?-\d+b(?!-a\d)|llama-?[23]|mistral"
_PLAIN_WEIGHTS = ("", "none", "bf16", "fp16", "auto")


class Deployment(NamedTuple):
    """A server of a model as somebody publishes it.

    Attributes:
        pool: of KV; "": none that is lent.
        over_ranks: whether a worker over ranks trains models of that kind.
        precision: of the weights, as the recipe says.
        options: of the command line.
    """

    pool: str
    over_ranks: bool
    precision: str
    options: dict[str, Any]


def pool_of(name: str, architecture: str, options: Mapping[str, Any]) -> str:
    """Return the KV pool of a runtime; "": none that is lent, or the worker does not train it."""
    if "is-embedding" in options or re.search(_NOT_AS_DECLARED, name):
        return ""
    return POOLS.get(architecture, "")


def sections(folder: Path) -> Iterator[Deployment]:
    """Yield decode's section of each recipe; the KV pool is guessed by the model's names."""
    for path in sorted(folder.rglob("*.y*ml")):
        try:
            recipe = yaml.safe_load(path.read_text())
        except yaml.YAMLError:
            continue
        if not isinstance(recipe, Mapping):
            continue
        base = recipe.get("base") or recipe
        backend = base.get("backend") or {}
        config = backend.get("sglang_config") or {}
        decode = config.get("decode")
        if not isinstance(decode, Mapping):
            continue
        model = base.get("model") or {}
        names = [base.get("name"), model.get("path"), decode.get("served-model-name"), path.name]
        said = " ".join(map(str, names)).lower()
        pool = next((pool for pattern, pool in _POOLS if re.search(pattern, said)), "")
        options = {"nnodes": _nodes(base, decode), **decode}
        over_ranks = pool == "heads" and re.search(_OVER_RANKS, said) is not None
        yield Deployment(pool, over_ranks, str(model.get("precision", "")), options)


def _nodes(recipe: Mapping[str, Any], decode: Mapping[str, Any]) -> int:
    """Return over how many nodes the ranks of one decode engine are."""
    on_each = (recipe.get("resources") or {}).get("gpus_per_node")
    named = ("tp-size", "tensor-parallel-size", "tp_size", "tensor_parallel_size")
    ranks = next((decode[name] for name in named if name in decode), 1)
    known = isinstance(on_each, int) and isinstance(ranks, int)
    return -(-ranks // on_each) if known and on_each else 1


def runtimes(folder: Path) -> Iterator[Deployment]:
    """Yield the same of each aggregated runtime of OME that runs SGLang."""
    for path in sorted(folder.rglob("srt/**/*.y*ml")):
        for document in yaml.safe_load_all(path.read_text()):
            spec = (document or {}).get("spec") or {}
            if "decoderConfig" in spec or "engineConfig" not in spec:
                continue
            runner = spec["engineConfig"].get("runner") or {}
            words = [*(runner.get("command") or []), *(runner.get("args") or [])]
            text = " ".join(map(str, words)).replace("\\\n", " ")
            if "sglang" not in text:
                continue
            found = re.findall(r"--([\w-]+)(?:[ =]+(?!--)(\S+))?", text)
            name = path.stem.lower()
            options = {k: v or True for k, v in found}
            formats = spec.get("supportedModelFormats") or [{}]
            architectures = {str(each.get("modelArchitecture")) for each in formats}
            architecture = architectures.pop() if len(architectures) == 1 else ""
            pool = pool_of(name, architecture, options)
            over_ranks = architecture.removesuffix("ForCausalLM").lower() in ARCHITECTURES
            yield Deployment(pool, over_ranks, "fp8" if "fp8" in name else "", options)


def refusal(found: Deployment, parallelism: Parallelism) -> str:
    """Return what the first check that refuses looks at; "": it harvests."""
    pool, precision = found.pool, found.precision
    options = {key.replace("-", "_"): value for key, value in found.options.items()}
    options = {_ALIASES.get(key, key): value for key, value in options.items()}
    for key, value in options.items():
        if isinstance(value, str) and value.isdecimal():
            options[key] = int(value)
    ranks = options.get("tp_size", 1)
    if parallelism == "ignored":
        options |= _PARALLEL
    elif parallelism != "counted":
        options["tp_size"] = 1
    page = options.get("page_size")
    line = {
        **{name: fine for name, fine, _ in sglang._PLAIN},
        **sglang._DEFAULTS,
        "disaggregation_transfer_backend": "nixl",
        **options,
        "disaggregation_mode": options.get("disaggregation_mode", "null"),
        "page_size": page if isinstance(page, int) and page > 1 else 16,
    }
    try:
        sglang.check_arguments(SimpleNamespace(**line))
    except UserError as error:
        return str(error.field)
    if not pool:
        return "the model's kind: its KV pool, or a worker that does not train it"
    sparse = options.get("dsa_decode_backend") or options.get("nsa_decode_backend")
    if pool == "indexed" and "fp8" in str(line["kv_cache_dtype"]) and sparse != "trtllm":
        return "sparse attention's KV with scales between its vectors"
    coded = str(options.get("quantization") or precision).lower()
    if coded not in _CODED:
        return f"weights in {coded}"
    if parallelism == "trained" and ranks != 1:
        if not found.over_ranks:
            return f"over ranks: a model whose KV pool is {pool}, or of experts"
        if coded not in _PLAIN_WEIGHTS:
            return f"over ranks: weights in {coded}"
    return ""


def main() -> int:
    """Count; returns the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--recipes", type=Path, help="of srt-slurm")
    parser.add_argument("--runtimes", type=Path, help="of OME")
    options = parser.parse_args()
    results: list[Result] = []
    env: dict[str, Any] = {**environment(), "refused": {}}
    for kind, folder, read in (
        ("srt-slurm decode sections", options.recipes, sections),
        ("OME aggregated runtimes", options.runtimes, runtimes),
    ):
        if folder is None:
            continue
        found = [*read(folder)]
        results.append(Result(kind, len(found), "", "higher"))
        for parallelism, words, goal in _STEPS:
            why = Counter(refusal(one, parallelism) for one in found)
            env["refused"][f"{kind}, {words}"] = dict(why.most_common())
            share = why.pop("", 0) / max(1, len(found))
            results.append(Result(f"{kind}, {words}", share, "share", "higher", goal))
    if not results:
        sys.stdout.write("no folder is named: see --help\n")
        return 0
    write("coverage", results, env, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

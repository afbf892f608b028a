from __future__ import annotations

from types import SimpleNamespace

import pytest

from windrow import sglang
from windrow.errors import UserError
from windrow_sidecar.compute.sharing import ENV_PARTITION
from windrow_sidecar.engines.sglang import compat
from windrow_sidecar.engines.sglang.graphs import wanted_partition


def arguments(**changed):
    """A command line that the plugin takes, as SGLang's ServerArgs has it."""
    plain = {
        **{name: fine for name, fine, _ in sglang._PLAIN},
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "mooncake",
        "device": "cuda",
        "page_size": 16,
        "kv_cache_dtype": "auto",
        "attention_backend": "triton",
        "decode_attention_backend": None,
    }
    return SimpleNamespace(**{**plain, **changed})


def test_a_plain_decode_server_is_taken():
    compat.check_arguments(arguments())
    compat.check_arguments(arguments(disaggregation_mode="null", enable_pdmux=None))
    compat.check_arguments(arguments(device="cpu", disaggregation_transfer_backend="fake"))
    compat.check_arguments(arguments(device="cpu", disaggregation_transfer_backend="mooncake"))
    compat.check_arguments(arguments(device="cpu", disaggregation_mode="null"))
    compat.check_arguments(arguments(device="cpu", disaggregation_mode="null", tp_size=2))
    compat.check_arguments(arguments(kv_cache_dtype="fp8_e4m3", attention_backend="trtllm_mla"))
    compat.check_arguments(arguments(decode_attention_backend="trtllm_mha"))
    compat.check_arguments(arguments(attention_backend="dsa"))
    for draft in ("EAGLE", "EAGLE3", "NEXTN", "eagle"):
        compat.check_arguments(arguments(speculative_algorithm=draft))
    compat.check_arguments(arguments(speculative_algorithm="EAGLE", speculative_eagle_topk=1))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"page_size": 1}, "--page-size"),
        ({"page_size": None}, "--page-size"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype"),
        ({"attention_backend": "flex_attention"}, "--attention-backend"),
        ({"decode_attention_backend": "cutlass_mla"}, "--decode-attention-backend"),
        ({"tp_size": 2}, "--tp-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"dp_size": 4}, "--dp-size"),
        ({"tp_size": 16, "nnodes": 2}, "--nnodes"),
        ({"tp_size": 2, "ep_size": 2, "device": "cpu"}, "--ep-size"),
        ({"tp_size": 2, "pp_size": 2, "device": "cpu"}, "--pp-size"),
        ({"tp_size": 2, "nnodes": 2, "device": "cpu"}, "--nnodes"),
        ({"tp_size": 2, "enable_dp_attention": True, "device": "cpu"}, "--enable-dp-attention"),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, "--enable-dp-attention"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk",
        ),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"cpu_offload_gb": 8}, "--cpu-offload-gb"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"device": "xpu"}, "--device"),
        (
            {"device": "cpu", "disaggregation_transfer_backend": "nixl"},
            "--disaggregation-transfer-backend",
        ),
    ],
)
def test_what_the_plugin_does_not_know_is_refused_by_its_flag_with_a_remedy(changed, field):
    with pytest.raises(UserError) as refused:
        compat.check_arguments(arguments(**changed))
    assert refused.value.field == field
    assert refused.value.remedy


def test_an_untested_version_is_refused_unless_the_user_insists():
    compat.check_version(compat.TESTED[-1], insisted=False)
    compat.check_version("0.9.99", insisted=True)
    with pytest.raises(UserError, match=r"SGLang 0\.9\.99 .*WINDROW_SGLANG_UNTESTED=1"):
        compat.check_version("0.9.99", insisted=False)


@pytest.mark.parametrize(
    ("changed", "environment", "seconds"),
    [
        ({}, {}, 60),
        ({}, {compat.ENV_TRANSFER_GUARD: "2.5"}, 2.5),
        ({"disaggregation_transfer_backend": "fake"}, {}, 0),
        ({"disaggregation_mode": "null"}, {}, 0),
    ],
)
def test_a_chunk_waits_for_transfers_that_may_still_write(changed, environment, seconds):
    assert compat.transfer_guard_ns(environment, arguments(**changed)) == seconds * 1e9


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_what_is_no_number_of_seconds_is_refused(text):
    with pytest.raises(UserError, match="not a number of seconds") as refused:
        compat.transfer_guard_ns({compat.ENV_TRANSFER_GUARD: text}, arguments())
    assert refused.value.field == compat.ENV_TRANSFER_GUARD


def test_decode_is_confined_only_where_that_is_asked_for_and_can_be():
    plain = arguments(disable_cuda_graph=False)
    assert wanted_partition({}, plain) == "none"
    assert wanted_partition({ENV_PARTITION: "green"}, plain) == "green"
    for environment, changed, field in (
        ({ENV_PARTITION: "pdmux"}, {}, ENV_PARTITION),
        ({ENV_PARTITION: "green"}, {"device": "cpu"}, ENV_PARTITION),
        ({ENV_PARTITION: "green"}, {"disable_cuda_graph": True}, "--disable-cuda-graph"),
        ({ENV_PARTITION: "green"}, {"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ):
        with pytest.raises(UserError) as refused:
            wanted_partition(environment, arguments(**{"disable_cuda_graph": False, **changed}))
        assert refused.value.field == field


def resolving(without: str = "", changed: str = ""):
    """An SGLang in which every name is as expected, but for these."""

    def resolve(path: str):
        if path == without:
            raise AttributeError(path)
        parameters = dict(compat.NAMES)[path]
        if path == changed:
            parameters = ("self", "something_else")
        found = {}
        exec(f"def call({', '.join([*parameters, '*more'])}): pass", found)
        return found["call"]

    return resolve


def test_names_that_are_as_expected_pass():
    compat.check_names(resolving())


@pytest.mark.parametrize("path", [path for path, _ in compat.NAMES])
def test_each_name_that_is_missing_is_refused_by_name(path):
    with pytest.raises(UserError, match=path.rpartition(".")[2]):
        compat.check_names(resolving(without=path))


@pytest.mark.parametrize("path", [path for path, wanted in compat.NAMES if len(wanted) > 1])
def test_each_name_that_takes_other_arguments_is_refused(path):
    with pytest.raises(UserError, match="something_else"):
        compat.check_names(resolving(changed=path))


OFFICIAL = "docker.io/lmsysorg/sglang:v0.5.23-cu129"
PLAIN = [
    "python3",
    "-m",
    "sglang.launch_server",
    "--disaggregation-mode",
    "decode",
    "--page-size",
    "64",
]


@pytest.mark.parametrize(
    ("words", "image", "said"),
    [
        ([], OFFICIAL, ""),
        (["--tp", "1", "--kv-cache-dtype=bf16"], OFFICIAL, ""),
        (["--tp", "$(TP)"], OFFICIAL, ""),
        (["--attention-backend", "fa3"], "registry.example/ours:1", ""),
        ([], f"{OFFICIAL}@sha256:{'0' * 64}", ""),
        ([], "lmsysorg/sglang:v0.5.9-cu126", "SGLang 0.5.9 is not one"),
        ([], "registry.example:5000/mirror/sglang:0.4.1", "SGLang 0.4.1 is not one"),
        (["--tp", "2"], OFFICIAL, "--tp-size: 2 is not supported yet on GPUs"),
        (["--tp", "2", "--device", "cpu", "--disaggregation-mode", "null"], OFFICIAL, ""),
        (["--tp", "2", "--ep=2", "--device=cpu"], OFFICIAL, "--ep-size"),
        (["--tensor-parallel-size=8"], OFFICIAL, "--tp-size"),
        (["--dp", "2"], OFFICIAL, "--dp-size"),
        (["--tp", "16", "--nnodes", "2"], OFFICIAL, "not in a LeaderWorkerSet's group"),
        (
            ["--tp", "8", "--enable-dp-attention"],
            OFFICIAL,
            "--enable-dp-attention: is not supported",
        ),
        (["--kv-cache-dtype", "fp4_e2m1"], OFFICIAL, "--kv-cache-dtype"),
        (["--speculative-algorithm", "EAGLE"], OFFICIAL, ""),
        (["--speculative-algo", "UNO"], OFFICIAL, "--speculative-algorithm"),
        (
            ["--speculative-algorithm=EAGLE3", "--speculative-eagle-topk", "8"],
            OFFICIAL,
            "--speculative-eagle-topk",
        ),
        (["--enable-hierarchical-cache", "--port", "80"], OFFICIAL, "--enable-hierarchical-cache"),
        (["--attention-backend", "flashmla"], OFFICIAL, "--attention-backend"),
        (["--page-size", "1"], OFFICIAL, "--page-size"),
        (["--device", "npu"], "ours:1", "NVIDIA's GPUs and cores, not npu"),
        (["--device", "cuda:0"], OFFICIAL, ""),
    ],
)
def test_a_manifest_is_refused_for_what_the_plugin_would_refuse(words, image, said):
    refusal = sglang.refusal([*PLAIN, *words], image)
    assert said in refusal if said else refusal == ""


def test_a_manifest_without_a_page_size_and_one_that_insists():
    assert "--page-size 16 or more" in sglang.refusal(PLAIN[:-2], OFFICIAL)
    assert sglang.refusal(PLAIN, "lmsysorg/sglang:v0.5.9", insisted=True) == ""

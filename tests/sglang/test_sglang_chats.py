"""Ask SGLang itself for which models it writes chats otherwise than by their template."""

from __future__ import annotations

import json
import os

import pytest

from windrow.sglang import own_rendering

PATHS = {
    "/models/check-points/chat": True,
    "/models/checkpoints/chat": False,
    "/models/vicuna-7b": True,
    "/data/unlimited/qwen3": True,
    "/models/InternVL3-8B": True,
    "/models/Janus-Pro-7B": True,
    "/models/MiniCPM-V-2_6": True,
    "/models/MiniCPM4-8B": False,
    "/models/whisper-large": True,
    "/models/llava-v1.6-34b": True,
    "/models/deepseek-vl2-small": True,
    "/models/DeepSeek-V3": False,
    "/models/Phi-4-multimodal-instruct": True,
    "/models/phi-4": False,
    "/models/PaddleOCR-VL": True,
    "/models/Llama-3.1-8B-Instruct": False,
    "Qwen/Qwen3-8B": False,
}
# With a chat template in the tokenizer.
ARCHITECTURES = {
    "DeepseekV4ForCausalLM": True,
    "KimiK3ForCausalLM": True,
    "InklingForConditionalGeneration": True,
    "DeepseekV3ForCausalLM": False,
    "Qwen3ForCausalLM": False,
}
PARSERS = {"deepseekv32": True, "deepseekv4": True, "kimi_k3": True, "deepseekv3": False}
ASK = """
import json, sys
from types import SimpleNamespace
from sglang.srt.entrypoints.openai.chat_encoding import resolve_chat_encoding_spec as spec
from sglang.srt.parser.conversation import get_conv_template_by_model_path as by_path
paths, architectures, parsers = json.loads(sys.argv[1])
tokenizer = SimpleNamespace(chat_template="{{ messages }}")
def encodes(architecture, parser=None):
    config = SimpleNamespace(architectures=[architecture], model_type="")
    return spec(hf_config=config, tokenizer=tokenizer, tool_call_parser=parser) is not None
print(json.dumps([
    {path: by_path(path) is not None for path in paths},
    {each: encodes(each) for each in architectures},
    {each: encodes("Qwen3ForCausalLM", each) for each in parsers},
]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory, programs) -> list[dict[str, bool]]:
    folder = tmp_path_factory.mktemp("chats")
    program, log = folder / "ask.py", folder / "log"
    program.write_text(ASK)
    asked = json.dumps([list(PATHS), list(ARCHITECTURES), list(PARSERS)])
    with log.open("wb") as output:
        code = programs.run([str(program), asked], os.environ, output, timeout_s=300)
    assert code == 0, log.read_text()[-4000:]
    return list(json.loads(log.read_text().splitlines()[-1]))


def test_paths_architectures_and_parsers_are_judged_as_sglang_does(answers):
    assert answers == [PATHS, ARCHITECTURES, PARSERS]
    assert {path: bool(own_rendering(path)) for path in PATHS} == PATHS
    assert {each: bool(own_rendering("", [each])) for each in ARCHITECTURES} == ARCHITECTURES
    assert {each: bool(own_rendering("", None, each)) for each in PARSERS} == PARSERS

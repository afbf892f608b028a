"""A model is trained over exactly the weights of its files, or refused by name."""

from __future__ import annotations

import errno
import json
import re
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2VLConfig,
    T5Config,
)

from windrow.errors import UserError
from windrow.protocol import Ending
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.weights import load_weights, plan_layout
from windrow_sidecar.engines.fingerprint import model_fingerprint, served_files
from windrow_sidecar.engines.weight_files import weight_files
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.model import loading
from windrow_sidecar.finetune.model.loading import (
    ExportedWeights,
    NoTemporaryDirectory,
    _told_as_unusable,
    find_model,
    load_base,
)
from windrow_sidecar.finetune.model.whole import check_types
from windrow_sidecar.testing.models import save_byte_tokenizer, save_random_llama

pytestmark = pytest.mark.usefixtures("one_thread")

UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
SHARD = "model-00002-of-0000"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_random_llama(folder, tie_word_embeddings=False)
    return folder


@pytest.fixture
def folder(tmp_path, whole):
    """A copy of the model that may be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change(folder, *, without=(), **tensors) -> None:
    file = folder / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if name not in without}
    save_file(kept | tensors, file, metadata={"format": "pt"})


def shard(folder) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")


def cut(folder, file="model.safetensors", n_bytes=None) -> None:
    path = next(folder.glob(f"{file}*"))
    path.write_bytes(path.read_bytes()[: n_bytes or path.stat().st_size // 2])


def name_another_shard(folder) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = "nowhere.safetensors"
    path.write_text(json.dumps(index))


def lose_a_tensor_of_a_shard(folder) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][NORM]
    save_file({n: t for n, t in load_file(path).items() if n != NORM}, path)


def configure(folder, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def make_classifier(folder) -> None:
    LlamaForSequenceClassification(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)


def loaded(folder, **options):
    return load_base(find_model(str(folder), "main"), **options)


def exported(folder) -> ExportedWeights:
    """The weights of the files as decode exports them."""
    places, parts, end = {}, [], 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        places[name] = {"offset": end, "shape": list(tensor.shape), "dtype": "float32"}
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
        end += tensor.nbytes
    return ExportedWeights({"fingerprint": "f", "tensors": places}, torch.cat(parts))


WAYS = {
    "from files": lambda folder: loaded(folder),
    "over decode's weights": lambda folder: loaded(folder, exported=exported(folder)),
    "a few layers at a time": lambda folder: loaded(folder, room_bytes=500_000),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        ({"without": [UP]}, f"it lacks {UP}"),
        ({"without": ["lm_head.weight"]}, "it lacks lm_head.weight"),
        ({"without": [UP, NORM]}, f"it lacks {UP} and 1 more"),
        ({"odd": torch.ones(3)}, "it holds odd, which is not a tensor of this model"),
        ({NORM: torch.ones(3)}, f"{NORM} has shape (3,), LlamaForCausalLM by its config.json has"),
    ],
)
def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_refused_by_name(
    folder, way, breaks, words
):
    change(folder, **breaks)
    with pytest.raises(UserError) as refused:
        WAYS[way](folder)
    assert words in refused.value.problem
    assert str(folder) in refused.value.problem
    assert (refused.value.field, refused.value.reason) == ("spec.model.name", "ModelUnsupported")


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_are_rightly_absent(tmp_path, way):
    model = save_random_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    base = WAYS[way](tmp_path)
    assert torch.equal(base.model.lm_head.weight, model.model.embed_tokens.weight)
    if base.frozen is not None:
        base.frozen.close()


def test_a_head_of_its_own_under_a_config_that_ties_it_is_told(folder):
    assert loaded(folder).notes == ()
    configure(folder, tie_word_embeddings=True)
    base = loaded(folder)
    assert base.model.lm_head.weight is not base.model.model.embed_tokens.weight
    (note,) = base.notes
    assert "tie_word_embeddings" in note


def test_code_of_the_models_own_that_is_not_run_is_told(folder):
    configure(folder, auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})
    (note,) = loaded(folder).notes
    assert "modeling_own.OwnModel" in note


def test_a_buffer_that_the_model_makes_itself_may_lie_in_its_files(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=2)).save_pretrained(
        tmp_path
    )
    save_byte_tokenizer(tmp_path)
    change(tmp_path, **{"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)})
    assert loaded(tmp_path).model is not None


@pytest.mark.parametrize("shards", [True, False])
def test_files_beside_the_weights_count_for_nothing_and_are_told(folder, shards):
    whole_bytes = (folder / "model.safetensors").stat().st_size
    if shards:
        shard(folder)
    files, known = weight_files(folder), model_fingerprint(folder)
    assert (len(files) > 2) is shards
    assert loaded(folder).notes == ()
    # Other values under the same names: a reader would serve another model.
    other = {name: t + 1 for name, t in load_file(files[0]).items()}
    save_file(other | {"x": torch.ones(1 << 20)}, folder / "consolidated.safetensors")
    assert (weight_files(folder), model_fingerprint(folder)) == (files, known)
    assert served_files(folder) == files
    base = loaded(folder, room_bytes=2 * whole_bytes)
    assert base.frozen is None
    (note,) = base.notes
    assert note.startswith("the model's weights are " + ("what" if shards else "model.safetensors"))
    assert note.endswith(": consolidated.safetensors beside it is not read")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_codes_of_a_quantisation_are_not_taken_for_weights(folder, dtype):
    codes = load_file(folder / "model.safetensors")[UP].to(dtype)
    change(folder, **{UP: codes})
    for way in ("from files", "a few layers at a time"):
        with pytest.raises(UserError) as refused:
            WAYS[way](folder)
        assert UP in refused.value.problem, way
    config = read_config(folder)
    layout = plan_layout(config)
    with pytest.raises(UserError, match=UP):
        load_weights(folder, layout, torch.zeros(layout.n_bytes, dtype=torch.uint8))


def test_decode_reads_no_file_beside_the_weights(folder):
    config = read_config(folder)
    layout = plan_layout(config)
    found = []
    for _ in range(2):
        storage = torch.zeros(layout.n_bytes, dtype=torch.uint8)
        load_weights(folder, layout, storage)
        found.append(storage)
        tensors = {name: t + 1 for name, t in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "a.safetensors")
        save_file(tensors, folder / "z.safetensors")
    assert torch.equal(*found)


@pytest.mark.parametrize("broken", ["a shard is missing", "half a shard", "no index", "a pointer"])
def test_decode_and_worker_refuse_the_same_folders_each_by_its_own_field(folder, broken):
    breaks, words = BROKEN[broken]
    breaks(folder)
    with pytest.raises(UserError, match=words) as refused:
        model_fingerprint(folder)
    assert refused.value.field == "--model-path"


# How a folder is broken, and words of what is said of it.
BROKEN = {
    "half a file": (cut, r"model\.safetensors is cut short: it has \d+ of \d+ bytes. Copy the"),
    "half a header": (lambda at: cut(at, n_bytes=99), r"cut short: it has 99 bytes. Copy the"),
    "no weights in the file": (
        lambda at: (at / "model.safetensors").write_bytes(bytes(64)),
        r"model\.safetensors is not a safetensors file. Copy the model again",
    ),
    "a pointer": (
        lambda at: (at / "model.safetensors").write_text("version https://git-lfs.github.com/x\n"),
        r"model\.safetensors is a pointer of Git LFS, not the file. Run git lfs pull",
    ),
    "no file": (
        lambda at: (at / "model.safetensors").unlink(),
        r"model holds no weights as safetensors. Use a model that is kept as safetensors",
    ),
    "pickled weights": (
        lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
        r"holds no weights as safetensors, only pytorch_model\.bin. Write them as safetensors: ",
    ),
    "a link to nowhere": (
        lambda at: (
            (at / "model.safetensors").unlink(),
            (at / "model.safetensors").symlink_to("../blobs/a1"),
        ),
        r"model\.safetensors is a link to \.\./blobs/a1, which is not there. Copy the model again",
    ),
    "an index without shards": (
        lambda at: (
            shard(at),
            (at / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        ),
        r"index\.json names no shard",
    ),
    "a shard is missing": (
        lambda at: (shard(at), next(at.glob(f"{SHARD}*")).unlink()),
        r"model-00002-of-\d+\.safetensors is missing, which model\.safetensors\.index\.json names",
    ),
    "half a shard": (
        lambda at: (shard(at), cut(at, SHARD)),
        r"model-00002-of-\d+\.safetensors is cut short",
    ),
    "another shard in the index": (
        lambda at: (shard(at), name_another_shard(at)),
        r"nowhere\.safetensors is missing, which model\.safetensors\.index\.json names",
    ),
    "a shard without a tensor": (
        lambda at: (shard(at), lose_a_tensor_of_a_shard(at)),
        r"lacks model\.norm\.weight, which .*index\.json says is in it",
    ),
    "a broken index": (
        lambda at: (shard(at), (at / "model.safetensors.index.json").write_text("{")),
        r"model\.safetensors\.index\.json is not an index of shards",
    ),
    "no index": (
        lambda at: (shard(at), (at / "model.safetensors.index.json").unlink()),
        r"holds model-00001-of-\d+\.safetensors, but neither model\.safetensors nor an index",
    ),
    "a classifier": (
        make_classifier,
        r"config\.json says LlamaForSequenceClassification\): it lacks lm_head\.weight; it holds "
        r"score\.weight, .* Use a checkpoint of a causal language model",
    ),
    "no configuration": (lambda at: (at / "config.json").unlink(), r"holds no config\.json"),
    "a broken configuration": (
        lambda at: (at / "config.json").write_text("{"),
        r"config\.json cannot be loaded: .* not a valid JSON file. Use the model's own",
    ),
    "a configuration that divides by zero": (
        lambda at: configure(at, num_attention_heads=0),
        r"config\.json cannot be loaded: ZeroDivisionError",
    ),
    "an activation that nobody knows": (
        lambda at: configure(at, hidden_act="nope"),
        r"cannot be loaded: KeyError: 'nope'",
    ),
    "a type that nobody knows": (
        lambda at: configure(at, model_type="gigallama"),
        r"config\.json cannot be loaded: .*`gigallama`.* has to be one that transformers has",
    ),
    "images": (
        lambda at: Qwen2VLConfig().save_pretrained(at),
        r"config\.json says Qwen2VLConfig with vision_config, which is not a decoder-only language",
    ),
    "an encoder": (
        lambda at: T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(at),
        r"config\.json says T5ForConditionalGeneration, which is not a decoder-only language model",
    ),
    "a library that is not here": (
        lambda at: configure(at, quantization_config={"quant_method": "aqlm"}),
        r"cannot be loaded: ImportError: .*aqlm.* spec\.model\.quantization quantises them",
    ),
    "no tokenizer": (
        lambda at: [file.unlink() for file in at.glob("token*")],
        r"the tokenizer in .* cannot be loaded: .* Copy the model's tokenizer\.json",
    ),
    "a broken tokenizer": (
        lambda at: (at / "tokenizer.json").write_text("{"),
        r"the tokenizer in .* cannot be loaded: .* Copy the model's tokenizer\.json",
    ),
    "an adapter": (
        lambda at: (at / "adapter_config.json").write_text('{"base_model_name_or_path": "/base"}'),
        r"holds an adapter .*, which is not a base model. Name the model .* made for: /base",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_folder_that_is_no_whole_model_is_the_users_error_with_file_and_remedy(folder, how):
    breaks, words = BROKEN[how]
    breaks(folder)
    with pytest.raises(UserError, match=words) as refused:
        loaded(folder)
    assert str(folder) in refused.value.problem
    assert refused.value.field == "spec.model.name"


def test_a_machine_without_a_directory_for_temporary_files_is_no_fault_of_the_model(monkeypatch):
    # As with a root file system that is read-only and no volume at /tmp.
    monkeypatch.setattr(tempfile, "tempdir", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(NoTemporaryDirectory) as told, _told_as_unusable("config.json"):
            tempfile.gettempdir()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search("No usable temporary directory found in .*: free space there", str(told.value))
    event, ending = failure(told.value, "")
    assert (event.user_error, ending) == (False, Ending.FAILED)


def test_a_cache_that_may_only_be_read_is_used_and_completed_elsewhere(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    asked = []

    def download(name, cache_dir=None, **_):
        asked.append(cache_dir)
        if cache_dir is None:
            raise OSError(errno.EROFS, "Read-only file system", "/cache/hf/hub/refs/main")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(loading, "check_files", lambda path: None)
    assert find_model("own/model", "main") == tmp_path
    assert asked[0] is None
    assert asked[1] is not None


def in_fp8(folder, block: int) -> None:
    """Store the projections as checkpoints of DeepSeek and Qwen do: 8 bits, a scale a block."""
    file, made = folder / "model.safetensors", {}
    for name, weight in load_file(file).items():
        rows, columns = weight.shape if weight.dim() == 2 else (1, 1)
        if not name.endswith("_proj.weight") or rows % block or columns % block:
            made[name] = weight.bfloat16()
            continue
        blocks = weight.float().reshape(rows // block, block, columns // block, block)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(rows, columns)
        made[name] = codes.to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales.contiguous()
    assert any(name.endswith("_scale_inv") for name in made)
    save_file(made, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "fmt": "e4m3",
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_in_fp8_are_trained_over_as_the_numbers_they_stand_for(folder):
    plain = load_base(folder).model
    in_fp8(folder, 16)
    base = load_base(folder)
    found = {
        f"{name}.weight": module.weight
        for name, module in base.model.named_modules()
        if hasattr(module, "weight")
    }
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(found[name], weight, rtol=0.07, atol=0.02)
    ids = torch.arange(6)[None]
    assert base.model(ids).logits.dtype == torch.float32
    assert any(not torch.equal(found[n], w) for n, w in plain.named_parameters())


def test_weights_in_fp8_do_not_take_turns_and_the_reason_is_told(folder):
    in_fp8(folder, 16)
    with pytest.raises(UserError, match=r"cannot take turns: config\.json says .* by fp8"):
        load_base(folder, room_bytes=1)


def test_codes_that_stay_codes_are_told_by_the_method_that_config_json_names(folder):
    change(folder, **{UP: torch.zeros(1).to(torch.float8_e4m3fn).expand(1).clone()})
    model = LlamaForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    model.lm_head.weight = torch.nn.Parameter(
        model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(UserError, match=r"no plain weights though config\.json names odd"):
        check_types(folder, model, "odd")

"""SGLang's KV pools in an arena hold what they hold in memory of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def played(tmp_path_factory, programs):
    folder = tmp_path_factory.mktemp("pools")
    result, log = folder / "result.json", folder / "log"
    program = str(Path(__file__).parent / "pool_process.py")
    with log.open("wb") as output:
        programs.run([program, str(result)], os.environ, output, timeout_s=500)
    assert result.exists(), log.read_text()[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, t) for kind in ("heads", "latent") for t in ("bf16", "fp8_e4m3", "fp8_e5m2")),
        ("latent with an index", "bf16"),
    ],
)
def test_kv_of_heads_and_of_latent_attention_is_the_same_in_16_and_in_8_bits(played, kind, dtype):
    found = played[f"{kind}, {dtype}"]
    n_bytes = 2 if dtype == "bf16" else 1
    # Three layers of one vector lie in two pairs.
    numbers = 3 * 2 * 2 * 16 if kind == "heads" else 2 * 2 * 32
    assert found == {
        "same": True,
        "inside": True,
        "infos": True,
        "dtype_bytes": n_bytes,
        "token_bytes": numbers * n_bytes,
        "whole_pages": True,
        "tokens": True,
    }


@pytest.mark.parametrize(
    ("of", "layers", "others", "n_bytes"),
    [
        ("EAGLE", 6, 2, 2 * 976 * 16 * 2),  # one layer of one head
        ("heads, MTP", 6, 2, 2 * 976 * 2 * 16 * 2),
        ("latent, MTP", 3, 1, 976 * 32 * 2),
        ("latent with an index", 3, 3, 3 * 16 * 64 * 132),
        ("hybrid", 4, 0, 0),
        ("hybrid, latent", 2, 0, 0),
    ],
)
def test_a_page_is_lent_of_every_pool_under_its_number_or_of_none(
    played, of, layers, others, n_bytes
):
    """Drafts and indexes keep their memory; a lent page's number is handed out to nobody."""
    found = played["lent"][of]
    assert found.pop("lent") >= 4
    assert found == {
        "none of the lent is handed out": True,
        "all come back": True,
        "zeroed": True,
        "others keep theirs": True,
        "others reach every page": True,
        "layers": layers,
        "beside": [others, n_bytes],
    }


def test_of_sliding_windows_the_other_layers_pages_are_lent_and_the_windows_stay(played):
    found = played["windows"]
    # Stock's pool beside ours: KV of each request, free pages of both parts, nothing lent in use.
    assert found["wrong"] == []
    assert found["lent"] == found["asked back"] > 10
    assert found["most requests"] == 6
    # Transfers: lengths as stock's; the context from the arena, the windows from SGLang's memory.
    assert found["infos"] == found["sent from"] == [True, True]
    assert found["layers"] == 2
    assert found["unlent"] == 2 * 3 * (320 + 16) * 2 * 16 * 2
    assert found["cleared"] == 960

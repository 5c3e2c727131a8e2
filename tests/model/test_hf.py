"""Checkpoints in and out: names, layouts, exactness, and what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from model_fixtures import QWEN3, QWEN3_5
from safetensors.numpy import load_file, save_file

from t1jax.checkpoint import lazy_leaves, load_params, save_params
from t1jax.model.config import QWEN3_5_122B_A10B, ModelConfig
from t1jax.model.hf import (
    abstract,
    by_path,
    export_checkpoint,
    export_params,
    import_checkpoint,
)
from t1jax.model.hf_config import HFError, to_hf
from t1jax.model.hf_files import INDEX, Shards
from t1jax.model.hf_names import accepted, bare_name, from_leaf, part_of, tensors, text_name
from t1jax.model.lm import init_policy

ROOT = Path(__file__).parent.parent.parent
CONFIGS = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_bfloat16_tied": dataclasses.replace(
        QWEN3_5, param_dtype="bfloat16", tie_embeddings=True
    ),
    "qwen3": QWEN3,
    "qwen3_bfloat16": dataclasses.replace(QWEN3, param_dtype="bfloat16"),
}


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every leaf full of distinct values."""
    rng = np.random.default_rng(seed)
    return {
        path: rng.standard_normal(x.shape).astype(x.dtype) for path, x in abstract(config).items()
    }


def tree(config: ModelConfig, leaves: dict[str, np.ndarray]):
    like = jax.eval_shape(lambda: init_policy(config, jax.random.key(0)))
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[key] for key in by_path(like)])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of QWEN3_5 in one file, to be spoilt."""
    export_params(random_params(QWEN3_5), QWEN3_5, tmp_path / "hf")
    return tmp_path / "hf"


def spoil(folder: Path, change) -> None:
    """Rewrites the one shard after change(tensors)."""
    (path,) = folder.glob("*.safetensors")
    loaded = load_file(path)
    change(loaded)
    save_file(loaded, path)
    (folder / INDEX).unlink(missing_ok=True)


def refuse(folder: Path, says: str, **options) -> None:
    out = folder.parent / "policy"
    with pytest.raises(HFError, match=says) as caught:
        import_checkpoint(folder, out, **options)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("writers", [1, 3])
def test_round_trip_is_exact(name, writers, tmp_path):
    config, leaves = CONFIGS[name], random_params(CONFIGS[name])
    files = export_params(leaves, config, tmp_path / "hf", shard_bytes=4000, writers=writers)
    assert len(files) > 3
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    assert set(index["weight_map"]) == set(map(text_name, tensors(config)))
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in leaves.values())
    host = import_checkpoint(tmp_path / "hf", tmp_path / "policy")
    assert ModelConfig(**host["model"]) == dataclasses.replace(
        config, dtype="float32", logits_dtype="float32"
    )
    found = load_params(tmp_path / "policy", tree(config, leaves))
    jax.tree.map(np.testing.assert_array_equal, found, tree(config, leaves))
    export_checkpoint(tmp_path / "policy", tmp_path / "again", None, None, 4000)
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_a_linear_map_is_stored_out_by_in(folder):
    """By hand: what transformers calls q_proj.weight is the transpose of the kernel here."""
    leaves = random_params(QWEN3_5)
    (path,) = folder.glob("*.safetensors")
    stored, root = load_file(path), "model.layers.3."
    at = "trunk/blocks/layer_1/"
    np.testing.assert_array_equal(
        stored[root + "self_attn.q_proj.weight"], leaves[at + "attn/q_proj/kernel"][1].T
    )
    gate_up = leaves[at + "moe/gate_up"][1, 2]
    np.testing.assert_array_equal(stored[root + "mlp.experts.gate_up_proj"][2], gate_up.T)
    shared = leaves[at + "moe/shared_gate_up/kernel"][1]
    np.testing.assert_array_equal(stored[root + "mlp.shared_expert.up_proj.weight"], shared.T[6:])
    conv = leaves["trunk/blocks/layer_0/delta/conv"][1]
    np.testing.assert_array_equal(stored["model.layers.2.linear_attn.conv1d.weight"][:, 0], conv.T)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_experts_come_fused_or_one_by_one(prefix, tmp_path):
    """Every form a checkpoint may have gives the same parameters."""
    for config in (QWEN3_5, QWEN3):
        leaves, forms = random_params(config), {}
        for name, place in accepted(config).items():
            fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            if fused == (config.family == "qwen3_5_moe") or "mlp.experts." not in name:
                view = part_of(place, leaves[place.leaf][place.index])
                tensor = np.ascontiguousarray(from_leaf(place, view))
                forms[name if name.startswith("lm_head") else prefix + name] = tensor
        out = tmp_path / config.family
        (out / "hf").mkdir(parents=True)
        save_file(forms, out / "hf/model.safetensors")
        (out / "hf/config.json").write_text(json.dumps(to_hf(config, "float32")))
        import_checkpoint(out / "hf", out / "policy")
        found = load_params(out / "policy", tree(config, leaves))
        jax.tree.map(np.testing.assert_array_equal, found, tree(config, leaves))


def test_vision_and_mtp_are_skipped_listed_and_carried_over(folder, tmp_path):
    extra = {
        "model.visual.patch_embed.proj.weight": np.arange(6, dtype=np.float32),
        "mtp.fc.weight": np.ones((2, 3), ml_dtypes.bfloat16),
    }
    spoil(folder, lambda loaded: loaded.update(extra))
    (folder / "tokenizer.json").write_text("{}")
    host = import_checkpoint(folder, tmp_path / "policy")
    assert host["skipped"] == sorted(extra)
    export_checkpoint(tmp_path / "policy", tmp_path / "again", folder, None, 10**9)
    again, before = Shards(tmp_path / "again"), Shards(folder)
    assert sorted(again.names()) == sorted(before.names())
    for name in before.names():
        assert again.head(name) == before.head(name)
        np.testing.assert_array_equal(again.read(name), before.read(name))
    assert (tmp_path / "again/tokenizer.json").read_text() == "{}"


def test_a_tied_head_that_is_stored_all_the_same_follows_the_embedding(tmp_path):
    config = CONFIGS["qwen3_5_bfloat16_tied"]
    old, new = random_params(config), random_params(config, seed=1)
    export_params(old, config, tmp_path / "hf")
    spoil(tmp_path / "hf", lambda loaded: loaded.update({"lm_head.weight": old["trunk/embed"]}))
    import_checkpoint(tmp_path / "hf", tmp_path / "policy")
    export_params(new, config, tmp_path / "again", like=Shards(tmp_path / "hf"))
    head = Shards(tmp_path / "again").read("lm_head.weight")
    np.testing.assert_array_equal(head, new["trunk/embed"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.down_proj"),
            r"layers.1.mlp.experts.down_proj is missing",
        ),
        (lambda t: t.update({"model.odd.weight": np.ones(2)}), "model.odd.weight is no tensor"),
        (
            lambda t: t.update({"lm_head.weight": np.ones((24, 40), np.float32)}),
            r"lm_head.weight has shape \[24, 40\], expected \[40, 24\]",
        ),
        (
            lambda t: t.update({"model.language_model.norm.weight": np.ones(24, np.float32)}),
            "model.(language_model.)?norm.weight and .* are the same tensor",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.ones((40, 24), np.int8)}),
            "lm_head.weight is I8, expected F32 or BF16",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.1.up_proj.weight": np.ones((10, 24), np.float32)}
            ),
            r"experts.1.up_proj.weight is also part of .*gate_up_proj",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder, change, says):
    spoil(folder, change)
    refuse(folder, says)


def test_an_expert_that_is_missing_is_noticed(tmp_path):
    export_params(random_params(QWEN3), QWEN3, tmp_path / "hf")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    spoil(tmp_path / "hf", lambda loaded: loaded.pop(name))
    refuse(tmp_path / "hf", f"{name} is missing")


def test_values_that_a_dtype_cannot_hold_are_refused(folder):
    refuse(folder, "does not fit bfloat16", dtype="bfloat16")


def test_a_tensor_in_two_files_or_in_another_than_the_index_says_is_refused(tmp_path):
    leaves = random_params(QWEN3)
    first, *_ = export_params(leaves, QWEN3, tmp_path / "hf", shard_bytes=4000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    (tmp_path / "hf" / INDEX).unlink()
    (tmp_path / "hf" / "copy.safetensors").write_bytes((tmp_path / "hf" / first).read_bytes())
    refuse(tmp_path / "hf", "model.embed_tokens.weight is in two files")
    (tmp_path / "hf" / "copy.safetensors").unlink()
    index["weight_map"].pop("model.embed_tokens.weight")
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    refuse(tmp_path / "hf", "does not list model.embed_tokens.weight")
    (tmp_path / "hf" / INDEX).write_text("{}")
    refuse(tmp_path / "hf", "has no weight_map")


def test_an_import_overwrites_nothing(folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for out in (folder, folder / "config.json"):
        with pytest.raises(HFError, match="is not empty: name a new folder"):
            import_checkpoint(folder, out)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_an_export_is_of_the_dtype_asked_for(folder, tmp_path):
    params = random_params(QWEN3)
    export_params(params, QWEN3, tmp_path / "half", dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    shards = Shards(tmp_path / "half")
    assert {shards.head(name).dtype for name in shards.names()} == {"BF16"}
    with pytest.raises(HFError, match="says which dtypes to write: leave --dtype out"):
        export_params(params, QWEN3, tmp_path / "x", like=shards, dtype="float32")


def test_bfloat16_weights_start_a_float32_run(tmp_path):
    config = CONFIGS["qwen3_bfloat16"]
    leaves = random_params(config)
    save_params(tmp_path / "policy", tree(config, leaves), {})
    like = jax.eval_shape(lambda: init_policy(QWEN3, jax.random.key(0)))
    found = by_path(load_params(tmp_path / "policy", like))
    for path, leaf in leaves.items():
        assert found[path].dtype == np.float32
        np.testing.assert_array_equal(found[path], leaf.astype(np.float32))


def test_a_folder_that_is_no_checkpoint(folder):
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refuse(folder, "cannot be read")
    path.unlink()
    (folder / INDEX).unlink()
    refuse(folder, r"holds no \*.safetensors")
    (folder / "config.json").write_text("{")
    refuse(folder, "config.json is no JSON")
    (folder / "config.json").unlink()
    refuse(folder, "holds no config.json")


def test_names_of_the_real_model():
    names = tensors(QWEN3_5_122B_A10B)
    root = "model.language_model.layers.47."
    assert len([n for n in names if n.startswith(root)]) == 15
    assert root + "mlp.experts.gate_up_proj" in names and "lm_head.weight" in names
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in names
    leaves = abstract(QWEN3_5_122B_A10B)
    filled = {(place.leaf, place.index, place.part) for place in names.values()}
    assert len(filled) == len(names)
    assert {place.leaf for place in names.values()} == leaves.keys()
    assert bare_name(root) == "layers.47."


def test_a_leaf_is_read_where_it_is_indexed(tmp_path):
    leaves = random_params(QWEN3_5)
    save_params(tmp_path / "policy", tree(QWEN3_5, leaves), {})
    for path, lazy in lazy_leaves(tmp_path / "policy").items():
        assert lazy.shape == leaves[path].shape and lazy.dtype == leaves[path].dtype
        np.testing.assert_array_equal(lazy[(0,)], leaves[path][0])


MEASURE = """
import re, sys, threading, time
from pathlib import Path
from t1jax.model import hf

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)

verb, source, policy, again = sys.argv[1], *map(Path, sys.argv[2:])
hf.abstract(hf.from_hf(hf.Shards(source).config))  # JAX has started
before = peak = anonymous()
threading.Thread(target=watch, daemon=True).start()
if verb == "import":
    hf.import_checkpoint(source, policy)
else:
    hf.export_checkpoint(policy, again, source, None, 128_000_000)
print(peak - before)
"""


@pytest.mark.slow
def test_host_memory_stays_below_two_shards(tmp_path):
    config = dataclasses.replace(
        QWEN3_5, vocab_size=50_000, hidden_size=256, num_experts=64, expert_width=256, num_layers=8
    )
    export_params(random_params(config), config, tmp_path / "hf", shard_bytes=128_000_000)
    sizes = [p.stat().st_size for p in (tmp_path / "hf").glob("*.safetensors")]
    assert sum(sizes) > 3.5 * max(sizes)
    folders = [tmp_path / name for name in ("hf", "policy", "again")]
    for verb in ("import", "export"):
        command = [sys.executable, "-c", MEASURE, verb, *folders]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # count what is used, not kept
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 2 * max(sizes), verb


def test_the_command(folder, tmp_path):
    def run(*argv):
        command = [sys.executable, "-m", "t1jax.model.hf", *map(str, argv)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("import", f"--checkpoint={folder}", f"--out={tmp_path / 'policy'}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["num_layers"] == 4
    done = run("export", f"--checkpoint={tmp_path / 'policy'}", f"--out={tmp_path / 'again'}")
    assert done.returncode == 0, done.stderr
    (before,), (after,) = (p.glob("*.safetensors") for p in (folder, tmp_path / "again"))
    assert before.read_bytes() == after.read_bytes()
    for argv, says in (
        (["exprot"], "say import or export"),
        (["import", "--checkpoint=none", f"--out={tmp_path / 'x'}"], "none holds no config.json"),
        (["export", "--checkpoint=none", f"--out={tmp_path / 'x'}"], "there is no checkpoint"),
    ):
        done = run(*argv)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and says in done.stderr
        assert not (tmp_path / "x").exists()


def test_an_export_is_whole_or_not_there(tmp_path):
    params = random_params(QWEN3)
    plain = params["trunk/norm/scale"]

    class Full:
        shape, dtype = plain.shape, plain.dtype

        def __getitem__(self, index):
            raise OSError(28, "No space left on device")

    broken = params | {"trunk/norm/scale": Full()}
    with pytest.raises(OSError, match="No space"):
        export_params(broken, QWEN3, tmp_path / "hf", shard_bytes=4000)
    assert list(tmp_path.iterdir()) == []
    export_params(params, QWEN3, tmp_path / "hf")
    with pytest.raises(HFError, match="hf is not empty: name a new folder"):
        export_params(params, QWEN3, tmp_path / "hf")

"""Against transformers' float32 on random checkpoints of both families, read as it saved them.

Bounds: max |logit difference| 1e-3, mean 2e-5 under transformers' own experts. Free routing may differ only at
near ties, where two experts' probabilities are within NEAR_TIE of each other.
"""

import functools
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference.cases import CASES, LENGTHS

from t1jax.checkpoint import load_params, read_host
from t1jax.model.config import ModelConfig
from t1jax.model.hf import abstract, by_path, export_checkpoint, import_checkpoint
from t1jax.model.hf_files import Shards
from t1jax.model.hf_names import accepted, bare_name, from_leaf, part_of
from t1jax.model.lm import PolicyLM, head, init_policy, logits_of, token_logp

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-reference/bin/python"
NEAR_TIE = 1e-5
GRADIENT_LENGTH = 64
ALL = [(family, name) for family, cases in CASES.items() for name in cases]


class Case:
    """A checkpoint that was imported, and what transformers computes with it."""

    def __init__(self, source: Path, policy: Path):
        import_checkpoint(source, policy)
        self.config = ModelConfig(**read_host(policy)["model"])
        like = jax.eval_shape(lambda: init_policy(self.config, jax.random.key(0)))
        self.params = load_params(policy, like)
        self.arrays = np.load(source / "reference.npz")

    @functools.cache  # noqa: B019 lives as long as the tests
    def forward(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        """logits [T, V] under transformers' experts, and the experts [T, L, K] of free routing."""

        @jax.jit
        def run(params, tokens, experts):
            place = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
            out = PolicyLM(self.config).apply(params, tokens, *place, experts)
            return logits_of(
                self.config, out.hidden_BTD, head(self.config, params)
            ), out.experts_BTLK

        tokens, experts = self.arrays["tokens"][:, :T], self.arrays[f"experts_{T}"][None]
        logits = run(self.params, tokens, experts)[0]
        free = run(self.params, tokens, np.full_like(experts, -1))[1]
        return np.asarray(logits[0]), np.asarray(free[0])


@pytest.fixture(scope="module")
def cases(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return {key: Case(reference.joinpath(*key), folder / "-".join(key)) for key in ALL}


@pytest.fixture(params=ALL, ids="/".join)
def case(request, cases):
    return cases[request.param]


@pytest.mark.parametrize("T", LENGTHS)
def test_logits_under_its_experts(case, T):
    logits, theirs = case.forward(T)[0], case.arrays[f"logits_{T}"][0]
    error = np.abs(logits - theirs)
    assert error.max() <= 1e-3 and error.mean() <= 2e-5
    assert np.abs(logits).max() > 0.5  # the bound means something


@pytest.mark.parametrize("family", CASES)
def test_no_further_from_float64_than_transformers(cases, family):
    """Root mean square over cases and lengths, each in units of transformers' own error.

    Of single tokens and few there are too few numbers to compare: all errors are near 1e-6 there.
    """
    squares = []
    for name in CASES[family]:
        case = cases[family, name]
        for T in (64, 65, 513):
            exact, theirs = case.arrays[f"exact_{T}"][0], case.arrays[f"logits_{T}"][0]
            ours = np.mean((case.forward(T)[0] - exact) ** 2)
            squares.append(ours / np.mean((theirs - exact) ** 2))
    assert np.sqrt(np.mean(squares)) <= 1


@pytest.mark.parametrize("T", LENGTHS)
def test_free_routing_takes_the_same_experts(case, T):
    arrays = case.arrays
    used = case.forward(T)[1]
    differs = np.any(np.sort(used, -1) != np.sort(arrays[f"experts_{T}"], -1), axis=-1)
    if f"margin_{T}" in arrays:
        first = np.argwhere(differs)[:1]  # what follows a flip is another computation
        for t, layer in first:
            assert arrays[f"margin_{T}"][t, layer] < NEAR_TIE, (t, layer)
    else:
        assert not differs.any()
    assert differs.mean() < 0.01


def test_gradients_of_a_token_loss(case):
    config, arrays = case.config, case.arrays
    T = GRADIENT_LENGTH
    tokens = jnp.asarray(arrays["tokens"][:, :T])
    place = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    experts = jnp.asarray(arrays[f"experts_{T}"])[None]

    @jax.jit
    def gradient(params):
        def loss(params):
            logp, _, _ = token_logp(config, params, tokens, *place, experts, jnp.ones(1))
            return -jnp.sum(logp) / (T - 1)

        return jax.grad(loss)(params)

    ours = by_path(jax.device_get(gradient(case.params)))
    names = [n.removeprefix("gradient/") for n in arrays.files if n.startswith("gradient/")]
    floor = 1e-4 * max(np.abs(arrays[f"gradient/{name}"]).max() for name in names)
    known, seen = accepted(config), set()
    for name in names:
        place = known[bare_name(name)]
        mine = from_leaf(place, part_of(place, ours[place.leaf][place.index]))
        theirs = arrays[f"gradient/{name}"]
        # Below the floor a gradient is rounding alone: that of a router whose one expert weighs 1.
        assert np.abs(mine - theirs).max() <= 1e-3 * max(np.abs(theirs).max(), floor), name
        seen.add(place.leaf)
    assert seen == abstract(config).keys()


@pytest.mark.parametrize("family", CASES)
def test_a_checkpoint_survives_the_way_here_and_back(family, reference, tmp_path):
    """To the last bit of every tensor, under the names and in the forms transformers wrote."""
    source = reference / family / "odd_heads"
    import_checkpoint(source, tmp_path / "policy")
    export_checkpoint(tmp_path / "policy", tmp_path / "again", source, None, 20_000)
    before, after = Shards(source), Shards(tmp_path / "again")
    assert sorted(before.names()) == sorted(after.names())
    for name in before.names():
        assert before.head(name) == after.head(name)
        np.testing.assert_array_equal(before.read(name), after.read(name))


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_5_moe", "wide_shared"), ("qwen3_moe", "tied_top8")]
)
def test_transformers_reads_what_is_written_here(family, name, reference, tmp_path):
    """Without any file of the original: config.json, names and layouts are this project's own.

    The tensors are equal to the bit (the test above); torch's products are not from one process to
    the next, as their order of summation depends on the alignment of the mapped weights.
    """
    source = reference / family / name
    import_checkpoint(source, tmp_path / "policy")
    export_checkpoint(tmp_path / "policy", tmp_path / "hf", None, None, 20_000)
    command = [PYTHON, HERE / "read.py", tmp_path / "hf", source / "reference.npz"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5

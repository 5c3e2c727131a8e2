"""The four cases of a turn's boundary, by hand and at random, and the streams they give."""

import numpy as np
import pytest

from t1jax.agent.stitch import Boundary, Stitcher, boundary

# A toy tokenizer in which texts have several encodings: "ab" is [2], or [0, 1].
TEXTS = ["a", "b", "ab", "<end>", "\n", "<user>", "<bot>", "<think></think>", "ba", "c"]


def pieces(ids):
    return [TEXTS[i] for i in ids]


def ids(*values):
    return np.array(values, np.int32)


def text(array) -> str:
    return "".join(pieces(array))


@pytest.mark.parametrize(
    ("prompt", "reply", "after", "wanted"),
    [
        # The history is as the sampler had it.
        (ids(5, 0, 6), ids(2, 3), ids(5, 0, 6, 2, 3, 4, 5), Boundary("strict", 5)),
        (ids(5, 0, 6), ids(2, 3), ids(5, 0, 6, 2, 3), Boundary("strict", 5)),
        # The template drops the empty thoughts of past turns: s = 1.
        (ids(5, 0, 6, 7), ids(2, 3), ids(5, 0, 6, 2, 3, 4), Boundary("normalized", 5, (1, 0))),
        # It trims the reply's last newline and closes it itself: u = 2.
        (ids(5, 6), ids(2, 4, 3), ids(5, 6, 2, 9), Boundary("normalized", 3, (0, 2))),
        # Both: (1, 1).
        (ids(5, 6, 7), ids(2, 4), ids(5, 6, 2, 3), Boundary("normalized", 3, (1, 1))),
        # Only the reply's end came back as other ids: "c", "ab" as "c", "a", "b". It is not read twice.
        (ids(5, 6), ids(9, 2, 3), ids(5, 6, 9, 0, 1, 3, 4), Boundary("normalized", 6, (0, 2))),
        # The same behind thoughts that were dropped.
        (ids(5, 7), ids(9, 2, 3), ids(5, 9, 0, 1, 3, 4), Boundary("normalized", 5, (1, 2))),
        # "ab" came back as "a", "b".
        (ids(5, 6), ids(2, 3), ids(5, 6, 0, 1, 3, 4, 5), Boundary("retokenized", 5)),
        # The same words stood in the prompt, too: the later ones count.
        (ids(0, 1, 3, 6), ids(2, 3), ids(0, 1, 3, 6, 0, 1, 3, 4), Boundary("retokenized", 7)),
        # "bc" begins inside of "ab": no place to cut.
        (ids(6), ids(1, 9), ids(6, 2, 9), Boundary("split", 0)),
        # A summary took the place of the history.
        (ids(5, 0, 6), ids(2, 3), ids(5, 9, 9, 6), Boundary("split", 0)),
        # The reply was changed, and its words are said again later: not by the policy.
        (ids(5, 6), ids(2, 3), ids(5, 6, 9, 3, 5, 0, 1, 3), Boundary("split", 0)),
        # What the reply answered was changed.
        (ids(5, 0, 6), ids(2, 3), ids(5, 9, 6, 0, 1, 3, 4), Boundary("split", 0)),
        # Thoughts were dropped, and "ab" came back as "a", "b".
        (ids(5, 6, 7), ids(2, 3), ids(5, 6, 0, 1, 3, 4), Boundary("retokenized", 5)),
        # Of two places that would do, the one that drops less.
        (ids(5, 0, 1), ids(2), ids(5, 0, 1, 0, 1, 4), Boundary("retokenized", 5)),
        # Nothing would stand between the last reply and the next.
        (ids(5, 6, 7), ids(2, 3), ids(5, 6, 2, 3), Boundary("split", 0)),
        (ids(5, 6), ids(2, 3), ids(5, 6, 0, 1, 3), Boundary("split", 0)),
        # The next prompt is shorter than what it should continue.
        (ids(5, 0, 6), ids(2, 3), ids(5), Boundary("split", 0)),
    ],
)
def test_the_first_case_that_holds(prompt, reply, after, wanted):
    assert boundary(prompt, reply, after, pieces) == wanted


def test_of_equal_sums_the_one_that_keeps_the_reply():
    """a, a, a | a: without one id of either, the rest is the same prefix; u = 0 is taken."""
    found = boundary(ids(0, 0, 0), ids(0), ids(0, 0, 0, 9), pieces)
    assert found == Boundary("normalized", 3, (1, 0))


def test_drops_are_bounded():
    prompt, reply = np.zeros(200, np.int32), ids(1, 3)
    for s, case in ((96, "normalized"), (97, "retokenized")):
        after = np.concatenate([ids(*[0] * (200 - s)), reply, ids(4)])
        assert boundary(prompt, reply, after, pieces).case == case
    reply = np.concatenate([ids(2), ids(*[4] * 20)])
    for u, case in ((16, "normalized"), (17, "split")):
        after = np.concatenate([ids(5), reply[: len(reply) - u], ids(9)])
        assert boundary(ids(5), reply, after, pieces).case == case


@pytest.mark.parametrize(
    ("after", "cases"),
    [
        # The own context of the second turn, 4 6 7, may be dropped, the reply before it may not: by ids ...
        (ids(5, 6, 2, 3, 0, 3, 9), ("normalized", "normalized", "normalized")),
        (ids(5, 6, 2, 0, 3, 9), ("normalized", "normalized", "split")),
        (ids(5, 6, 0, 3, 9), ("normalized", "split", "split")),
        # ... and by text: the second reply, "a<end>", stands behind the first one, or does not.
        (ids(5, 6, 0, 1, 3, 4, 0, 3, 9), ("normalized", "retokenized", "retokenized")),
        (ids(5, 6, 9, 3, 4, 0, 3, 9), ("split", "split", "split")),
    ],
)
def test_only_the_turns_own_context_may_be_dropped(after, cases):
    first, reply, second = ids(5, 6), ids(2, 3), ids(5, 6, 2, 3, 4, 6, 7)
    for begin, case in zip((0, 3, 4), cases, strict=True):
        assert boundary(second, ids(0, 3), after, pieces, begin).case == case
    stitcher = Stitcher(pieces)
    stitcher.read(first)
    stitcher.add(reply, rows(0, 3), 0)
    assert stitcher.read(second) == Boundary("strict", 4)
    stitcher.add(ids(0, 3), rows(0, 8), 0)
    assert stitcher.read(after).case == cases[-1]


def rows(first: int, count: int) -> np.ndarray:
    """Recognisable experts: row i is [[first + i]]."""
    return np.arange(first, first + count, dtype=np.uint8).reshape(-1, 1, 1)


def play(*turns):
    """Turns of (prompt, reply, first row) joined: the streams, their experts, and the cases."""
    stitcher, streams, cases = Stitcher(pieces), [], []
    rng = np.random.default_rng(len(turns))
    for prompt, reply, first in turns:
        join = stitcher.read(prompt)
        every = rows(first, len(prompt) + len(reply) - 1)
        start = rng.integers(
            stitcher.rows + 1
        )  # a sampler may begin where it is asked to, or before
        stitcher.add(reply, every[start:], start)
        if join.case == "split":
            streams.append([])
        streams[-1] += [*prompt[join.resume :].tolist(), *reply.tolist()]
        assert stitcher.length == len(streams[-1])
        cases.append(join.case)
    return streams, [e[:, 0, 0].tolist() for e in stitcher.experts()], cases


def test_a_strict_boundary_keeps_every_row():
    streams, experts, _ = play((ids(5, 6), ids(2, 3), 0), (ids(5, 6, 2, 3, 4, 6), ids(0, 3), 100))
    assert streams == [[5, 6, 2, 3, 4, 6, 0, 3]]
    # Row 3, of the first reply's last id, comes from the next turn's pass.
    assert experts == [[0, 1, 2, 103, 104, 105, 106]]


def test_a_repaired_boundary_keeps_the_samplers_ids_and_copies_one_row():
    streams, experts, cases = play(
        (ids(5, 6, 7), ids(2, 3), 0),
        (ids(5, 6, 2, 3, 4, 6, 7), ids(0, 3), 100),  # s = 1
        (ids(5, 6, 2, 3, 4, 6, 0, 3, 9), ids(1, 3), 200),  # s = 1 again
    )
    assert streams == [[5, 6, 7, 2, 3, 4, 6, 7, 0, 3, 9, 1, 3]]
    assert experts == [[0, 1, 2, 3, 3, 104, 105, 106, 107, 107, 208, 209]]
    assert cases == ["split", "normalized", "normalized"]


def test_a_split_opens_a_chunk_and_a_later_turn_joins_that_one():
    streams, experts, cases = play(
        (ids(5, 6), ids(2, 3), 0),
        (ids(5, 9, 6), ids(0, 3), 10),
        (ids(5, 9, 6, 0, 3, 4), ids(1, 3), 20),
    )
    assert streams == [[5, 6, 2, 3], [5, 9, 6, 0, 3, 4, 1, 3]]
    assert experts == [[0, 1, 2], [10, 11, 12, 13, 24, 25, 26]]
    assert cases == ["split", "split", "strict"]


def test_what_cannot_be_joined_is_an_error():
    stitcher = Stitcher(pieces)
    stitcher.read(ids(5, 6))
    for experts, start in ((rows(0, 2), 0), (rows(0, 2), 1), (rows(0, 4), 0)):
        with pytest.raises(ValueError, match=r"experts of tokens \[.*needed are \[0, 3\)"):
            stitcher.add(ids(2, 3), experts, start)


def shown(turns, past: str = "<bot>", last: str = "<bot><think></think>") -> str:
    """What a harness shows the sampler of (reply, observation) turns, before one that is to come."""
    return "<user>c" + "".join(f"{past}{reply}\n<user>{seen}" for reply, seen in turns) + last


# Harnesses by what they do to the turns. All but the second leave out the thoughts of past ones.
HARNESSES = {
    "drops thoughts": shown,
    "keeps thoughts": lambda turns: shown(turns, past="<bot><think></think>"),
    "drops prompts": lambda turns: shown(turns, past=""),
    "prompts nothing": lambda turns: shown(turns, last=""),
    "says all twice": lambda turns: shown([t for turn in turns for t in (turn, turn)]),
    "rewrites replies": lambda turns: shown([(r.replace("b", "c"), o) for r, o in turns]),
    "opens replies": lambda turns: shown([(r.replace("<end>", ""), o) for r, o in turns]),
    "forgets replies": lambda turns: shown([("", o) for _, o in turns]),
    "forgets old turns": lambda turns: shown(turns[-2:]),
    "forgets the first turn": lambda turns: shown(turns[1:]),
    "forgets the last turn": lambda turns: shown(turns[:-1]),
    "counts": lambda turns: "c" * len(turns) + shown(turns),
}


def encode(value: str, rng) -> np.ndarray:
    """Some tokens that spell the text."""
    out = []
    while value:
        out.append(int(rng.choice([i for i, t in enumerate(TEXTS) if value.startswith(t)])))
        value = value[len(TEXTS[out[-1]]) :]
    return ids(*out)


@pytest.mark.parametrize("seed", range(300))
def test_streams_hold_every_reply_as_it_was_sampled(seed):
    """Random conversations of few words, in harnesses that change their mind."""
    rng = np.random.default_rng(seed)
    usual = str(rng.choice([*HARNESSES]))
    turns, stitcher, streams, last = [], Stitcher(pieces), [], None
    for _ in range(6):
        harness = str(rng.choice([*HARNESSES])) if rng.random() < 0.3 else usual
        dice = rng if rng.random() < 0.5 else np.random.default_rng(0)  # new ids, or as before
        prompt = encode(HARNESSES[harness](turns), dice)
        reply = np.append(encode("".join(rng.choice(["a", "b"], rng.integers(1, 4))), rng), 3)
        join = stitcher.read(prompt)
        if join.case != "split":
            assert said_before(*last, join, prompt), (usual, harness)
        every = np.append(prompt, reply)[:-1].astype(np.uint8)[:, None, None]
        start = rng.integers(stitcher.rows + 1)
        stitcher.add(reply, every[start:], start)
        if join.case == "split":
            streams.append([])
        streams[-1].append((join.case, prompt[join.resume :], reply))
        last = prompt, reply, join.resume
        turns.append((text(reply), "".join(rng.choice(["a", "b", "c"], rng.integers(3)))))

    assert [text(reply) for stream in streams for *_, reply in stream] == [r for r, _ in turns]
    for stream, experts in zip(streams, stitcher.experts(), strict=True):
        assert [case for case, *_ in stream].count("split") == 1
        tokens = np.concatenate([part for turn in stream for part in turn[1:]])
        # Each row is of the pass that read its token, but the copied ones: of the token before.
        read, at = tokens[:-1].copy(), 0
        for case, context, reply in stream:
            if case in ("normalized", "retokenized"):
                read[at - 1] = read[at - 2]
            at += len(context) + len(reply)
        np.testing.assert_array_equal(experts[:, 0, 0], read)


def said_before(prompt, reply, begin, join, after) -> bool:
    """Whether `after` says all that the stream did, but for an end of the turn's own context and its reply's."""
    u, resume = join.drop[1], join.resume
    if join.case == "strict":
        return after[:resume].tolist() == [*prompt.tolist(), *reply.tolist()]
    whole, least = text(prompt), len(text(prompt[:begin]))
    heads = [whole[:n] for n in range(least, len(whole) + 1)]
    tails = {text(reply), text(reply[: len(reply) - u])}
    return resume < len(after) and text(after[:resume]) in {h + t for h in heads for t in tails}

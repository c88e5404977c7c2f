"""Laws of block diffusion: K = L is the NELBO, K = 1 the chain of conditionals, an exact denoiser has the entropy for
every K; no block sees a later one, and a cache is exact."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from exact import ExactBlocks, sequences_of
from tiny import MODERN, random_tokens, tiny_model

from adlm.models.network import count_flops
from adlm.models.transformer import TILE, Ranges, attend, reading_positions, training_mask
from adlm.objectives import loss, make_objective, sequence_bounds
from adlm.objectives.nelbo import BlockSettings, masks_by_count
from adlm.schema import ModelConfig, NoiseConfig, ObjectiveConfig

L, MASK = 12, 10
LLAMA = {**MODERN, "qk_norm": False, "activation": "swiglu", "n_kv_heads": 1, "tied": True, "anchored": False}
NETWORKS = {
    "published": {"conditioning": "constant", "anchored": False},
    "modern": {**MODERN, "anchored": False},
    "anchored": {**MODERN, "bridge": "none"},
    "linear bridge": {"bridge": "linear", "conditioning": "none"},
    "llama": LLAMA,
    "llama anchored": {**LLAMA, "anchored": True, "bridge": "none"},
}
EVERY = [(name, shift) for name in NETWORKS for shift in (False, True)]


def network(name, shift=False, **more):
    options = {"block_length": "4", "shift": shift, **NETWORKS[name], **more}
    return tiny_model(dtype=torch.float64, **options).requires_grad_(False)


def objective_of(cfg, K, name="nelbo", **goal):
    settings = ObjectiveConfig(name=name, gamma_warmup=0.0, **{"gamma": 0.0, **goal})
    return make_objective(settings, NoiseConfig(), MASK, 1, replace(cfg, block_length=str(K)))


def lengths(*K):
    return torch.tensor(K)


# Who sees whom


@pytest.mark.parametrize("K", [1, 2, 5, 12])
def test_the_rule_is_that_of_a_loop(K):
    _, (found,) = training_mask(lengths(K), L)
    for q, k in itertools.product(range(2 * L), repeat=2):
        same, before = (q % L) // K == (k % L) // K, (k % L) // K < (q % L) // K
        expected = (before or same) if q >= L and k >= L else same if q < L and k < L else before if q < L else False
        assert found[0, q, k] == expected, (q, k)


@pytest.mark.parametrize("K", [1, 12])
def test_sequences_that_share_a_row_do_not_see_each_other(K):
    """A sequence of one block in the noisy half, and one of K = 1 or of one block in the clean half."""
    _, (found,) = training_mask(torch.tensor([[L, K]]), L)
    for q, k in itertools.product(range(2 * L), repeat=2):
        expected = (k < L) if q < L else k >= L and (k <= q or K == L)
        assert found[0, q, k] == expected, (q, k)


def test_ranges_are_tables_of_what_is_seen():
    first, last, end = (x[0].tolist() for x in Ranges.of(lengths(5), L))
    assert (first[7], last[7], end[7]) == (5, 10, L + 5), "noisy: its block, and clean tokens before it"
    assert (first[L + 7], last[L + 7], end[L + 7]) == (0, 0, L + 10), "clean: up to the end of its block"
    assert (first[11], last[11]) == (10, 12) and end[L + 11] == 2 * L, "the last block is shorter"


@pytest.mark.parametrize("K", [1, 3, 16, 100, TILE, 2 * TILE])
def test_flex_attention_is_attention_with_a_dense_mask(K):
    """Uncompiled flex_attention computes all scores, and skips no tile: those are checked one by one."""
    length, block_B = 2 * TILE, torch.tensor([(K, K), (7, 7), (2 * TILE, K)])
    generator = torch.Generator().manual_seed(K)
    q, k, v = (torch.randn(3, heads, 2 * length, 8, generator=generator) for heads in (2, 1, 1))
    (_, dense), (_, tiled) = (training_mask(block_B, length, form) for form in (False, True))
    found = attend(q, k, v, tiled)
    torch.testing.assert_close(found, attend(q, k, v, dense), rtol=1e-4, atol=1e-5)
    squares = dense.unfold(2, TILE, TILE).unfold(3, TILE, TILE)
    full, some = squares.all(-1).all(-1), squares.any(-1).any(-1)
    assert torch.equal(listed(tiled.full_kv_num_blocks, tiled.full_kv_indices), full)
    assert torch.equal(listed(tiled.kv_num_blocks, tiled.kv_indices), some & ~full)


def listed(count, index):
    """The tiles that a list names, as booleans."""
    chosen = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter(-1, index.long(), chosen)


@pytest.mark.parametrize(("name", "shift"), EVERY)
@pytest.mark.parametrize("K", [1, 4, 5])
def test_a_block_sees_nothing_that_follows(name, shift, K):
    """Predictions of block b depend on its own noisy tokens and on clean blocks before it, and on each of them."""
    model, x, z = network(name, shift), random_tokens(1, L, 10), random_tokens(1, L, 10, seed=1)
    before = model(torch.cat((z, x), 1), block_B=lengths(K))
    start = 4 // K * K
    stop = min(start + K, L)
    unseen = torch.cat((torch.arange(start), torch.arange(stop, L), L + torch.arange(start, L)))
    for at in unseen.tolist():
        tokens = torch.cat((z, x), 1)
        tokens[0, at] = (tokens[0, at] + 1) % 10
        after = model(tokens, block_B=lengths(K))
        assert torch.equal(after.denoiser_BLD[:, start:stop], before.denoiser_BLD[:, start:stop]), at
        if after.anchor_BLD is not None:
            assert torch.equal(after.anchor_BLD[:, start:stop], before.anchor_BLD[:, start:stop]), at
    seen = [L + start - 1] if start else []
    if not shift or K > 1:
        seen.append(start)
    for at in seen:
        tokens = torch.cat((z, x), 1)
        tokens[0, at] = (tokens[0, at] + 1) % 10
        after = model(tokens, block_B=lengths(K))
        assert not torch.equal(after.denoiser_BLD[:, start:stop], before.denoiser_BLD[:, start:stop]), at


# The two ends


@pytest.mark.parametrize(("name", "shift"), EVERY)
def test_one_block_is_the_whole_canvas(name, shift):
    model, x, z = network(name, shift), random_tokens(2, L, 10), random_tokens(2, L, 11, seed=1)
    whole, blocks = model(z), model(torch.cat((z, x), 1), block_B=lengths(L, L))
    torch.testing.assert_close(blocks.denoiser_BLD, whole.denoiser_BLD)
    if whole.anchor_BLD is not None:
        torch.testing.assert_close(blocks.anchor_BLD, whole.anchor_BLD)


@pytest.mark.parametrize("name", ["modern", "anchored", "llama"])
def test_blocks_of_one_shifted_token_are_a_causal_model(name):
    model, x = network(name, shift=True), random_tokens(3, L, 10)
    causal = network(name, causal=True, block_length="")
    causal.load_state_dict(model.state_dict())
    noisy = torch.full_like(x, MASK)
    states = model(torch.cat((noisy, x), 1), block_B=lengths(1, 1, 1)).denoiser_BLD
    torch.testing.assert_close(states[:, 1:], causal(x).denoiser_BLD[:, :-1])
    exact = make_objective(ObjectiveConfig(name="autoregressive", gamma=0.0), NoiseConfig(), MASK, 1)
    expected = sequence_bounds(causal, exact.corrupt_for_bound(sequences_of(x), 0))
    batch = objective_of(model.config, 1).corrupt_exact_count(sequences_of(x), 0)
    torch.testing.assert_close(sequence_bounds(model, batch), expected)
    assert batch.count == exact.corrupt_for_bound(sequences_of(x), 0).count
    trained = objective_of(model.config, 1).corrupt(sequences_of(x), 3, 0.5)
    torch.testing.assert_close(loss(model, trained).total, expected.sum())


@pytest.mark.parametrize("shift", [False, True])
def test_blocks_of_one_token_are_the_chain_of_conditionals(shift):
    """-sum_i log p(x_i | x_<i): each token predicted from a mask, or from the token before, and its clean past."""
    model, x = network("modern", shift), random_tokens(1, L, 10)
    total = 0.0
    for i in range(int(shift), L):
        noisy = torch.full_like(x, MASK)
        states = model(torch.cat((noisy, x), 1), block_B=lengths(1)).denoiser_BLD[0, i]
        logits = model.head(states)
        logits[MASK] = -torch.inf
        total -= logits.log_softmax(-1)[x[0, i]].item()
    found = sequence_bounds(model, objective_of(model.config, 1).corrupt_exact_count(sequences_of(x), 5))
    assert found.item() == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("estimator", ["corrupt_exact_count", "corrupt_for_bound"])
def test_an_exact_denoiser_has_the_entropy_for_every_block_length(K, estimator):
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(2, 2, 2, 2, generator=generator) ** 3
    p = p / p.sum()
    model = ExactBlocks(p)
    draws = torch.multinomial(p.reshape(-1), 20_000, replacement=True, generator=generator)
    cfg = ObjectiveConfig(name="nelbo", gamma=0.0, sampling_eps=1e-4)
    noise = NoiseConfig(name="loglinear", eps=1e-4)
    objective = make_objective(cfg, noise, model.mask_id, 0, ModelConfig(length=4, block_length=str(K)))
    values = sequence_bounds(model, getattr(objective, estimator)(sequences_of(model.sequences[draws]), 0))
    entropy = -(p * p.log()).sum().item()
    assert abs(values.mean().item() - entropy) < 4 * values.std().item() / math.sqrt(len(values))


@pytest.mark.parametrize("shift", [False, True])
def test_counts_and_times_estimate_one_bound(shift):
    model, x = network("modern", shift), random_tokens(1, L, 10).expand(4000, -1)
    objective = objective_of(model.config, 5)
    with torch.no_grad():
        counts, times = (
            sequence_bounds(model, corrupt(sequences_of(x), 0))
            for corrupt in (objective.corrupt_exact_count, objective.corrupt_for_bound)
        )
    error = math.hypot(counts.std().item(), times.std().item()) / math.sqrt(len(x))
    assert abs(counts.mean() - times.mean()) < 4 * error
    assert counts.std() < times.std()


def test_one_block_by_counts_is_the_bound_we_had():
    """Same noise, same network, same numbers: with K = L nothing of the block form is left."""
    model, x = network("modern"), random_tokens(6, L, 10)
    before = make_objective(ObjectiveConfig(name="nelbo", gamma=0.0), NoiseConfig(), MASK, 1)
    for name in ("corrupt_exact_count", "corrupt_for_bound"):
        old, new = (getattr(o, name)(sequences_of(x), 2) for o in (before, objective_of(model.config, L)))
        assert torch.equal(old.tokens_BL, new.tokens_BL) and new.block_B is None
        torch.testing.assert_close(sequence_bounds(model, new), sequence_bounds(model, old))


# Noise


@pytest.mark.parametrize("K", [1, 3, 5, 12])
def test_every_block_has_its_number_of_masks_with_the_weight_of_it(K):
    B = 400
    generator = torch.Generator().manual_seed(0)
    u, real = torch.rand(B, L, generator=generator, dtype=torch.float64), torch.rand(B, L, generator=generator) < 0.8
    most = -(-L // K)
    t = torch.rand(B, most, generator=generator, dtype=torch.float64)
    masked, weight, _ = masks_by_count(u, real, torch.full((B,), K), t)
    for b in range(most):
        part = slice(b * K, min((b + 1) * K, L))
        n = real[:, part].sum(-1)
        k = (masked & real)[:, part].sum(-1)
        some = n > 0
        assert torch.equal(k[some], ((t[:, b] * n).floor().long() + 1)[some])
        torch.testing.assert_close(weight[:, part][some], (n / k)[some, None].expand(-1, weight[:, part].shape[1]))
        largest = torch.where((masked & real)[:, part], u[:, part], 0).amax(-1)
        left = torch.where(~masked & real, u, 1)[:, part].amin(-1)
        assert (largest[some] < left[some]).all(), "the smallest uniforms are masked"


@pytest.mark.parametrize("kind", ["training", "corrupt_exact_count", "corrupt_for_bound"])
@pytest.mark.parametrize("K", ["2", "12"])
def test_every_step_draw_and_sequence_has_its_own_masks(kind, K):
    """No position is masked more often than the others: neither over steps, nor over sequences of a step."""
    x, objective = sequences_of(random_tokens(200, L, 10)), objective_of(network("modern").config, K)
    generator, batches = torch.Generator().manual_seed(0), []
    for i in range(200):
        timed = x._replace(times_B=torch.rand(200, generator=generator, dtype=torch.float64))
        batches.append(objective.corrupt(timed, i, 0.9) if kind == "training" else getattr(objective, kind)(timed, i))
    masked = torch.stack([batch.tokens_BL[:, :L] == MASK for batch in batches]).double()
    share = masked.mean().item()
    error = math.sqrt(share * (1 - share) / 200)
    for over in (0, 1):
        assert (masked.mean(over) - share).abs().max() < 6 * error


def test_sequences_of_a_step_take_the_block_lengths_in_turn():
    settings = BlockSettings((16, 1, 4, 64, 1024), shift=False)
    drawn = [settings.drawn(sequences_of(torch.zeros(10, 256, dtype=torch.long)), 1, step) for step in range(40)]
    assert all(sorted(K.tolist()) == [1, 1, 4, 4, 16, 16, 64, 64, 256, 256] for K in drawn)
    assert len({K[0].item() for K in drawn}) == 5, "from a random one on"
    assert torch.equal(drawn[3], settings.drawn(sequences_of(torch.zeros(10, 256, dtype=torch.long)), 1, 3))


@pytest.mark.parametrize("shift", [False, True])
def test_the_first_token_is_given_where_nothing_can_predict_it(shift):
    model, x = network("anchored", shift), random_tokens(40, L, 10)
    objective = objective_of(model.config, "4,2,6", "anelbo", gamma=0.1, anchor_rule="all", anchor_positions="masked")
    batch = objective.corrupt(sequences_of(x), 0, 0.5)
    first = batch.tokens_BL[:, 0] == MASK
    assert first.any() != shift
    assert batch.count == 40 * (L - shift) and torch.equal(batch.tokens_BL[:, L:], x)
    for term in batch.terms.values():
        assert ((term.positions_N % L == 0).any()) != shift
        assert torch.equal(term.targets_N, x.flatten()[term.positions_N])
        assert (batch.tokens_BL[:, :L].flatten()[term.positions_N] == MASK).all()


def test_padding_is_neither_scored_nor_counted():
    model, x = network("modern", shift=True), random_tokens(4, L, 10)
    real = torch.arange(L) < torch.tensor([[12], [7], [1], [0]])
    batch = objective_of(model.config, 4).corrupt(sequences_of(x, attention_mask_BL=real), 0, 0.5)
    assert batch.count == 11 + 6
    (term,) = batch.terms.values()
    assert real.flatten()[term.positions_N].all()


# The loss and the cache


@pytest.mark.parametrize(("name", "shift"), EVERY)
def test_states_of_chosen_tokens_are_those_of_all_tokens(name, shift):
    model, x, z = network(name, shift), random_tokens(2, L, 10), random_tokens(2, L, 11, seed=1)
    tokens, block_B = torch.cat((z, x), 1), lengths(4, 5)
    at = torch.tensor([1, 4, 5, 11, L + 2, L + 5, L + 10])
    every = model(tokens, block_B=block_B).denoiser_BLD.flatten(0, 1)
    torch.testing.assert_close(model(tokens, block_B=block_B, at_N=at).denoiser_BLD[0], every[at])
    assert reading_positions(block_B, L, shift).shape == (2, L)


def test_the_gradient_is_that_of_the_dense_loss():
    cfg = {"block_length": "4,1,12", "shift": True, **NETWORKS["llama anchored"]}
    model, x = tiny_model(dtype=torch.float64, **cfg), random_tokens(6, L, 10)
    goal = {"gamma": 0.3, "anchor_rule": "all", "anchor_positions": "masked"}
    objective = objective_of(model.config, "4,1,12", "anelbo", **goal)
    batch = objective.corrupt(sequences_of(x), 1, 0.5)
    loss(model, batch).total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    hidden = model(batch.tokens_BL, block_B=batch.block_B)
    total = 0
    for term in batch.terms.values():
        states = hidden.denoiser_BLD if term.head == "denoiser" else hidden.anchor_BLD
        logits = model.head(states.flatten(0, 1)[term.positions_N])
        if term.exclude is not None:
            logits = logits.index_fill(1, torch.tensor([term.exclude]), -torch.inf)
        nats = torch.nn.functional.cross_entropy(logits, term.targets_N, reduction="none")
        total = total + term.scale * (term.weights_N * nats).sum()
    total.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "shift"), EVERY)
@pytest.mark.parametrize("given", ["", "padding", "prompts"])
@pytest.mark.parametrize("K", ["4,1,12,1,0", "0,4,0,0,1", "4,0,1"])
def test_sequences_that_share_rows_have_the_loss_and_gradient_of_each_by_itself(name, shift, given, K):
    """Half of [noisy ; clean] is enough for one block, and for blocks of one shifted token."""
    x = random_tokens(11, L, 10)
    real = torch.arange(L) < torch.tensor([12, 7, 12, 9, 12, 3, 12, 12, 5, 12, 12])[:, None]
    more = {"attention_mask_BL": real} if given else {}
    more |= {"given_BL": torch.arange(L).expand(11, L) < 2} if given == "prompts" else {}
    model = network(name, shift, block_length=K).requires_grad_(True)
    goal = {"gamma": 0.3, "anchor_rule": "all", "anchor_positions": "masked"} if model.config.anchored else {}
    objective = objective_of(model.config, K, "anelbo" if goal else "nelbo", **goal)
    every = sequences_of(x, **more)

    def learn(parts):
        model.zero_grad()
        batches = [objective.corrupt(part, 3, 0.5) for part in parts]
        found = [loss(model, batch) for batch in batches]
        sum(output.total for output in found).backward()
        read = sum(batch.tokens_BL.numel() for batch in batches)
        gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return sum(output.total.item() for output in found), sum(batch.count for batch in batches), gradient, read

    total, count, gradient, read = learn([every])
    expected = learn([every.at(torch.arange(11) == i) for i in range(11)])
    assert total == pytest.approx(expected[0], rel=1e-12) and count == expected[1]
    assert gradient.keys() == expected[2].keys()
    for key in gradient:
        torch.testing.assert_close(gradient[key], expected[2][key], rtol=1e-9, atol=1e-12)
    drawn = objective.blocks.drawn(every, 1, 3)
    whole, single = int((drawn == L).sum()), int(((drawn == 1) & shift).sum())
    pairs = (whole + single) // 2 if whole >= single else whole
    assert read == 2 * L * (11 - pairs) and pairs > 0


@pytest.mark.parametrize("name", ["modern", "anchored", "llama"])
def test_the_cost_of_several_block_lengths_is_their_mean(name):
    def cost(K, shift=True, **more):
        return count_flops(network(name, shift, block_length=K, **more).config, 11, L, 0.5).training_per_token

    each = [cost(K) for K in ("4", "1", "0")]
    assert cost("4,1,0") == pytest.approx(sum(each) / 3)
    assert each[1] == pytest.approx(cost("", shift=False, causal=True)) and each[2] == pytest.approx(cost(""))
    assert cost("1", shift=False) > 1.5 * each[1], "predictions at their own masks need both halves"


@pytest.mark.parametrize("name", ["modern", "anchored", "linear bridge", "llama"])
@pytest.mark.parametrize("K", [1, 4, 5])
def test_a_cache_of_clean_blocks_is_exact(name, K):
    """Block by block with a cache, noisy and then clean in its place: the states of the one pass that trains."""
    model, x, z = network(name), random_tokens(2, L, 10), random_tokens(2, L, 11, seed=1)
    expected = model(torch.cat((z, x), 1), block_B=lengths(K, K)).denoiser_BLD
    cache = model.make_cache(2, L)
    for start in range(0, L, K):
        stop = min(start + K, L)
        for tokens in (z, x):
            cache.seen_B.fill_(start)
            states = model(tokens[:, start:stop], cache=cache, block_B=lengths(K, K)).denoiser_BLD
            if tokens is z:
                torch.testing.assert_close(states, expected[:, start:stop])

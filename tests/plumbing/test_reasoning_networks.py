"""Networks: memory equals none, thoughts equal a loop that recomputes everything; our stack and transformers."""

import functools
import math

import pytest
import torch
from hugging_face import make_folder
from tiny import MODERN, tiny_model

from adlm.data.tokenizers import load_tokenizer
from adlm.reasoning.answers import Accuracy, Answerer, Reply, Slot, generate, read_slots, score, wilson
from adlm.reasoning.methods import IGNORE, Encoded, Example, Markers, StagePlan, add_markers, lay_out, markers_of
from adlm.reasoning.networks import (
    HuggingFaceNetwork,
    OwnNetwork,
    batch_loss,
    load_base,
    load_hugging_face,
    make_batch,
    pad_sequences,
    read_sequences,
)
from adlm.reasoning.tasks import PROSQA
from adlm.training.parallel import World

CPU = torch.device("cpu")
V, MASK, EOS = 23, 22, 0
MARKERS = Markers(19, 20, 21)
NETWORKS = ["own", "own-modern", "gpt2", "llama"]


def own_network(**options):
    return OwnNetwork(tiny_model(V, MASK, length=32, causal=True, anchored=False, conditioning="none", **options))


def hf_network(kind, seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    if kind == "gpt2":
        cfg = transformers.GPT2Config(vocab_size=V, n_positions=32, n_embd=16, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(cfg)
    else:
        cfg = transformers.LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(cfg)
    with torch.no_grad():  # larger weights than at initialisation, so that a wrong position or mask shows
        for name, p in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                p.mul_(8)
    return HuggingFaceNetwork(model).eval()


def network_of(kind):
    if kind == "own":
        return own_network()
    if kind == "own-modern":
        return own_network(**{k: v for k, v in MODERN.items() if k != "conditioning"})
    return hf_network(kind)


def ragged(n_slots, seed=0, lengths=((3, 6), (7, 2), (1, 9), (12, 1))):
    """Sequences of a question, slots and a rest, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens, slots = [], []
    for before, after in lengths:
        ids = torch.randint(1, 19, (before + after,), generator=generator).tolist()
        at = range(before + 1, before + 1 + n_slots)
        middle = [MARKERS.boa, *[MARKERS.ant] * n_slots, MARKERS.eoa] if n_slots else []
        tokens.append([*ids[:before], *middle, *ids[before:]])
        slots.append(at)
    return tokens, slots


def naive(network, tokens, slots):
    """One row, read from the start again for every thought."""
    x_LD = network.embed(torch.tensor([tokens]))[0]
    for position in slots:
        hidden_LD = network.read(x_LD[None, :position])[0]
        x_LD = torch.cat([x_LD[:position], hidden_LD[-1:], x_LD[position + 1 :]])
    return network.read(x_LD[None])[0]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("n_slots", [0, 1, 3])
def test_thoughts_equal_a_naive_loop(kind, n_slots):
    network = network_of(kind)
    tokens, slots = ragged(n_slots)
    rows = pad_sequences(tokens, slots, fed_back=True, device=CPU)
    hidden_BLD = read_sequences(network, rows)
    for row, ids, at in zip(hidden_BLD, tokens, slots):
        torch.testing.assert_close(row[: len(ids)], naive(network, ids, at), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", NETWORKS)
def test_gradients_through_thoughts_equal_the_naive_ones(kind):
    network = network_of(kind)
    tokens, slots = ragged(2)
    generator = torch.Generator().manual_seed(1)
    width = network.head.weight.shape[1]
    probes = [torch.randn(len(ids), width, generator=generator) for ids in tokens]

    def gradients(values):
        network.zero_grad()
        sum((v * p).sum() for v, p in zip(values, probes)).backward()
        return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}

    hidden_BLD = read_sequences(network, pad_sequences(tokens, slots, fed_back=True, device=CPU))
    fast = gradients([row[: len(ids)] for row, ids in zip(hidden_BLD, tokens)])
    slow = gradients([naive(network, ids, at) for ids, at in zip(tokens, slots)])
    assert fast.keys() == slow.keys()
    for name, value in fast.items():
        scale = slow[name].abs().max().item() + 1e-6
        torch.testing.assert_close(value / scale, slow[name] / scale, atol=1e-4, rtol=1e-3, msg=name)


def test_a_thought_is_not_the_token_and_padding_changes_nothing():
    network = own_network()
    tokens, slots = ragged(2)
    fed = read_sequences(network, pad_sequences(tokens, slots, fed_back=True, device=CPU))
    plain = read_sequences(network, pad_sequences(tokens, slots, fed_back=False, device=CPU))
    alone = read_sequences(network, pad_sequences(tokens[:1], slots[:1], fed_back=True, device=CPU))
    before = slots[0].start
    torch.testing.assert_close(fed[0, :before], plain[0, :before])
    assert (fed[0, before] - plain[0, before]).abs().max() > 1e-3
    torch.testing.assert_close(fed[0, : len(tokens[0])], alone[0], atol=1e-5, rtol=1e-4)


def longhand(network, ids, at, fed_back, steps):
    """Greedy continuation of one row without memory."""
    written = []
    for _ in range(steps):
        hidden_LD = naive(network, [*ids, *written], at if fed_back else ())
        logits = network.head(hidden_LD[-1])
        logits[MASK] = -math.inf
        written.append(int(logits.argmax()))
        if written[-1] == EOS:
            break
    return written


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("fed_back", [False, True])
def test_cached_generation_equals_uncached(kind, fed_back):
    network = network_of(kind)
    tokens, slots = ragged(2)
    rows = pad_sequences(tokens, slots, fed_back, CPU)
    with torch.no_grad():
        wanted = [longhand(network, ids, at, fed_back, 8) for ids, at in zip(tokens, slots)]
    assert generate(network, rows, 8, EOS, MASK) == wanted
    assert len({tuple(w) for w in wanted}) > 1


def test_generation_ends_at_the_end_of_text_and_at_the_longest_row():
    network = own_network()
    rows = pad_sequences([[1, 2, 3], [4] * 28], [range(0), range(0)], False, CPU)
    texts = generate(network, rows, 100, eos_id=-1, mask_id=MASK)  # no such token: never ends by itself
    assert [len(t) for t in texts] == [network.longest - 28] * 2
    full = pad_sequences([[1] * network.longest], [range(0)], False, CPU)
    assert generate(network, full, 5, EOS, MASK) == [[]]
    text = generate(network, rows, 3, EOS, MASK)[0]
    last = text[1]
    assert generate(network, rows, 3, last, MASK)[0] == text[: text.index(last) + 1]


# ---- the loss


TOY = Encoded([1, 2], [[10, 11], [12]], [13, EOS], [[10], [11, 3], [12]])


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_loss_is_the_cross_entropy_of_the_labels(gamma):
    network = own_network()
    plans = [StagePlan(slots=3, removed=1, anchored=True)] * 2
    long = TOY._replace(question=[4, 5, 6, 7, 8])
    layouts = [lay_out(e, p, MARKERS) for e, p in zip((TOY, long), plans)]
    batch = make_batch(layouts, False, gamma, MASK, CPU)
    total = 0.0
    for layout in layouts:
        logits_LV = network.head(network.read(network.embed(torch.tensor([layout.tokens])))[0])
        logits_LV[:, MASK] = -math.inf
        log_p = logits_LV.log_softmax(-1)
        total -= sum(log_p[i, t] for i, t in enumerate(layout.targets) if t != IGNORE)
        total -= gamma * sum(log_p[i, t] for i, t in enumerate(layout.anchors) if t != IGNORE)
    output = batch_loss(network, batch)
    torch.testing.assert_close(output.total, total)
    assert output.count == sum(t != IGNORE for layout in layouts for t in layout.targets) == 6
    assert set(output.terms) == {"nll", "anchor"}


def test_without_labelled_slots_there_is_no_anchor_term():
    layout = lay_out(TOY, StagePlan(slots=2), MARKERS)
    assert set(make_batch([layout], False, 1.0, MASK, CPU).scored.terms) == {"nll"}


def test_tokens_of_a_batch_are_those_read_without_padding():
    long = TOY._replace(question=[4, 5, 6, 7, 8])
    layouts = [lay_out(e, StagePlan(slots=3), MARKERS) for e in (TOY, long)]
    batch = make_batch(layouts, False, 1.0, MASK, CPU, multiple=8)
    assert batch.scored.tokens_BL.shape == (2, 16)
    assert batch.tokens == sum(len(layout.tokens) for layout in layouts) == 27


# ---- slots


def test_slots_say_what_the_head_says_at_their_positions():
    network = own_network()
    tokens, slots = ragged(2)
    rows = pad_sequences(tokens, slots, False, CPU)
    labels = [[3, IGNORE], [IGNORE, 4], [5, 6], [7, 8]]
    found = read_slots(network, rows, labels, MASK)
    for said, ids, at, row in zip(found, tokens, slots, labels):
        logits_LV = network.head(network.read(network.embed(torch.tensor([ids])))[0])
        logits_LV[:, MASK] = -math.inf
        for slot, position, label in zip(said, at, row):
            assert (slot.token, slot.label) == (int(logits_LV[position].argmax()), label)
            wanted = 0.0 if label == IGNORE else -logits_LV[position].log_softmax(-1)[label].item()
            assert slot.nats == pytest.approx(wanted, abs=1e-4)


def test_the_accuracy_of_slots_counts_labelled_ones():
    replies = [
        Reply("", True, 4, True, (Slot(1, 1, 0.5), Slot(2, 3, 1.5), Slot(9, IGNORE, 0.0))),
        Reply("", False, 6, False, (Slot(1, 1, 0.1), Slot(2, IGNORE, 0.0), Slot(9, IGNORE, 0.0))),
    ]
    accuracy = score(replies)
    assert accuracy == Accuracy(2, 1, 5.0, 1, (1.0, 0.0), pytest.approx(0.7))
    assert accuracy.facts()["slot_1"] == 1.0 and accuracy.facts()["anchor_nats"] == pytest.approx(0.7)
    assert "anchors 100/0 %, 0.70 nats each" in str(accuracy)


# ---- transformers


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_in_our_stack_is_the_one_of_transformers(tmp_path, tied):
    """Loss and gradients of the fast path against the slow one, whose markers have the same mean embeddings."""
    transformers = pytest.importorskip("transformers")
    plain = load_tokenizer("bytes")
    torch.manual_seed(0)
    cfg = transformers.LlamaConfig(
        vocab_size=plain.vocab_size - 1, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    transformers.LlamaForCausalLM(cfg).save_pretrained(tmp_path)
    plain.save(tmp_path / "tokenizer.json")
    own, tokenizer = load_base(str(tmp_path))
    theirs, other = load_hugging_face(str(tmp_path))
    markers = markers_of(tokenizer)
    assert isinstance(own, OwnNetwork) and markers == markers_of(other) and tokenizer.vocab_size == other.vocab_size
    layouts = [lay_out(TOY, StagePlan(slots=n, anchored=True), markers) for n in (0, 3)]
    for plan in ([layouts[0]], [layouts[1]]):
        batch = make_batch(plan, False, 0.5, tokenizer.mask_id, CPU)
        losses = [batch_loss(network, batch).total for network in (own, theirs)]
        torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(
        own.model.embedding.grad, theirs.model.get_input_embeddings().weight.grad, atol=1e-4, rtol=1e-3
    )


def test_hugging_face_folder_gets_the_markers(tmp_path):
    plain = load_tokenizer("bytes")
    make_folder(tmp_path, plain)
    network, tokenizer = load_hugging_face(str(tmp_path))
    assert tokenizer.vocab_size == plain.vocab_size + 3
    weight = network.embed(torch.arange(tokenizer.vocab_size))
    assert weight.shape[0] == tokenizer.vocab_size == network.head.weight.shape[0]
    torch.testing.assert_close(weight[-1], weight[: plain.vocab_size].mean(0))
    assert tokenizer.encode("abc") == plain.encode("abc")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_compiled_block_serves_all_blocks(kind, monkeypatch):
    """For each length; reads with a memory are not compiled."""
    network, plain, compiled = hf_network(kind), hf_network(kind), []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    network.compile_blocks()
    for length in (8, 16, 8):
        x_BLD = plain.embed(torch.arange(2 * length).view(2, length) % V)
        torch.testing.assert_close(network.read(x_BLD), plain.read(x_BLD))
    assert len(compiled) == 2
    rows = pad_sequences(*ragged(0), False, CPU)
    assert generate(network, rows, 4, EOS, MASK) == generate(plain, rows, 4, EOS, MASK)
    assert len(compiled) == 2


def test_hugging_face_mistakes_are_one_line(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"reason\.base=.*is no causal model") as error:
        load_hugging_face(str(tmp_path))
    assert "\n" not in str(error.value)


def test_logits_that_are_more_than_a_head_are_refused():
    from adlm.reasoning.networks import check_head

    network = hf_network("gpt2")
    check_head(network, "fine")
    plain = network.model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    network.model.forward = scaled
    with pytest.raises(ValueError, match="not supported"):
        check_head(network, "scaled")


def test_own_network_refuses_a_bidirectional_model():
    with pytest.raises(ValueError, match="causal"):
        OwnNetwork(tiny_model(V, MASK, anchored=False))


# ---- scores


def test_wilson_against_known_values():
    """Wilson (1927); values from R's binom::binom.confint(..., methods='wilson')."""
    for (correct, n), (low, high) in {
        (0, 10): (0.0, 0.2775),
        (10, 10): (0.7225, 1.0),
        (97, 100): (0.9155, 0.9897),
        (50, 100): (0.4038, 0.5962),
    }.items():
        assert wilson(correct, n) == pytest.approx((low, high), abs=1e-4)


class Parrot(torch.nn.Module):
    """A network that writes a fixed text, whatever it is asked."""

    anchor_head, longest = None, 1000

    def __init__(self, tokens, vocab_size):
        super().__init__()
        self.text, self.vocab_size = tokens, vocab_size

    def head(self, hidden):
        place = hidden[:, 0].long()
        text = torch.tensor(self.text)
        return torch.nn.functional.one_hot(text[place.clamp(max=len(text) - 1)], self.vocab_size).float()

    def embed(self, tokens):
        return torch.zeros(*tokens.shape, 1)

    def remember(self, batch, length, gradients):
        return {"place": torch.zeros(batch)}

    def read(self, x, memory=None, real_B=None):
        out = x.clone() + memory["place"][:, None, None]
        memory["place"] += 1
        return out


def test_scores_count_right_answers_tokens_and_thoughts():
    tokenizer = add_markers(load_tokenizer("bytes"))
    examples = [Example(f"q{i}", ("s",), answer, ()) for i, answer in enumerate(("yes", "no", "yes"))]
    text = [*tokenizer.encode("### yes"), tokenizer.eos_id]
    world = World(0, 1, CPU, "fp32", "none")

    def score(plan, limit, reads_before=0):
        parrot = Parrot([0] * reads_before + text, tokenizer.vocab_size)
        return Answerer(parrot, tokenizer, PROSQA, plan, limit, batch_size=2).answer(examples, world)

    result, texts = score(StagePlan(removed=10), 20)
    assert result == Accuracy(3, 2, 7.0, 0)
    assert [reply.text for reply in texts] == ["### yes"] * 3
    assert [reply.correct for reply in texts] == [True, False, True]
    assert result.facts()["accuracy"] == pytest.approx(2 / 3)
    assert "66.7 %" in str(result)
    assert score(StagePlan(removed=10), 5)[0] == Accuracy(3, 0, 5.0, 3)
    fed = score(StagePlan(slots=2, removed=10, fed_back=True), 20, reads_before=3)[0]
    assert fed == Accuracy(3, 2, 9.0, 0)  # two thoughts are two more sequential steps
    assert score(StagePlan(slots=2, removed=10), 20)[0].tokens == 7.0  # given slots are read at once

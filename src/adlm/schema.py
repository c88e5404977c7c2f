"""Every setting of the package, with its meaning and unit: plain dataclasses that import nothing.

Lower layers take one section (`build_model(cfg.model, ...)`), never the whole tree; `config.py` fills the tree from
YAML groups and the command line. Classes stay mutable because OmegaConf composes onto them; treat them as read-only
after `config.load`. The string under a field is its help text.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """One transformer family: plain or anchored, bidirectional or causal, published block or modern block."""

    hidden_size: int = 768
    """Width D of the residual stream."""
    n_heads: int = 12
    """Attention heads; must divide hidden_size into an even head width."""
    n_blocks: int = 12
    """Blocks before the anchors are read (all blocks, when not anchored)."""
    n_denoiser_blocks: int = 6
    """Blocks after the anchors are read; ignored when not anchored. The paper uses half of n_blocks."""
    length: int = 1024
    """Longest row in tokens."""
    dropout: float = 0.1
    """Dropout probability on the output of attention and MLP, in training."""
    anchored: bool = True
    """Two stages: an anchor network whose prediction feeds a denoiser."""
    bridge: str = "collapsed"
    """How anchors reach the denoiser: collapsed (the paper's, residual stream cut), residual (stream kept, prediction
    added through a zero-initialised map), none (stream kept, anchors only in the loss)."""
    causal: bool = False
    """Attention to the past only (AR, A2R)."""
    adaln: bool = True
    """Modulate norms and gates by a conditioning vector, as the published block does."""
    time_conditioning: bool = False
    """Condition on the noise level sigma(t); needs adaln. False conditions on a constant."""
    cond_dim: int = 128
    """Width of the conditioning vector."""
    norm: str = "layernorm"
    """layernorm or rmsnorm."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    value_residual: bool = False
    """Blocks attend to a learned mixture of their own values and those of the first block of the residual stream."""
    skips: bool = False
    """The last block also reads the residual stream as it was after the first, the second to last as it was after the
    second, and so on, each times a learned factor that starts at 0."""
    activation: str = "gelu"
    """MLP activation: gelu (tanh form) or relu2 (squared ReLU)."""
    bias: bool = True
    """Biases in MLP, heads and bridge."""
    zero_init: bool = False
    """Start the output projections of attention and MLP at zero (the published block instead has zero gates)."""
    mlp_ratio: int = 4
    """Width of the MLP over hidden_size."""
    init: str = "torch"
    """torch (uniform +-1/sqrt(fan-in), heads at zero, as published) or normal (standard deviation 0.02)."""


@dataclass
class NoiseConfig:
    name: str = "loglinear"
    """Masking schedule: loglinear, linear, geometric, cosine, cosine-squared or polynomial."""
    eps: float = 1e-3
    """Smallest kept probability at t=1 (loglinear, cosine, ...)."""
    sigma_min: float = 1e-4
    """Geometric schedule: sigma at t=0."""
    sigma_max: float = 20.0
    """Geometric schedule: sigma at t=1."""
    power: float = 2.0
    """Polynomial schedule: alpha = 1 - (1-eps) t^power."""


@dataclass
class ObjectiveConfig:
    name: str = "anelbo"
    """anelbo, nelbo, d3pm, score-entropy or autoregressive."""
    gamma: float = 3e-3
    """Weight of the anchor term (0: plain NELBO through both stages)."""
    gamma_warmup: float = 3e-3
    """Share of the run over which gamma rises linearly from 0 (0: constant)."""
    gamma_end: float = -1.0
    """Where gamma moves, linearly, from the end of its warm-up to the end of the run (-1: it stays)."""
    anchor_rule: str = "count"
    """Which tokens are anchors: count (at most tau times in its row), common (more often), rarity (corpus frequency),
    all, loss (hard), none."""
    tau: int = 5
    """count rule: a token is an anchor if it occurs at most tau times in its own row (common rule: more often)."""
    rarity: float = 1e-4
    """rarity rule: a token is an anchor if its share of the training corpus is at most this."""
    hard: float = 4.0
    """loss rule: a token is an anchor if the anchor network's cross-entropy there is at least this many nats."""
    anchor_positions: str = "all"
    """all: every anchor carries the anchor loss (the release); masked: only masked ones."""
    anchor_share: float = 1.0
    """Share of the anchors, drawn anew at every step, that carries the anchor loss for all of them: 0.25 makes it cost
    a quarter, and right on average."""
    T: int = 0
    """Number of discrete time steps of the bound; 0 is continuous time."""
    time_density_a: float = 1.0
    """Training times are drawn from Beta(a, b); (1, 1) is the bound, anything else a deliberate reweighting."""
    time_density_b: float = 1.0
    """See time_density_a."""
    time_density_anneal: float = 0.0
    """Share of the run after which times are uniform again, reached linearly (0: never annealed)."""
    sampling_eps: float = 1e-3
    """Smallest time visited."""


@dataclass
class DataConfig:
    name: str = "pydocs"
    """A name of the corpora table (`adlm data list`); `file` reads data.path."""
    path: str = ""
    """Local file or folder in the corpus' published format; empty: the hub, or the embedded corpus."""
    valid_path: str = ""
    """Local file or folder of the validation split; empty: held out of `path`."""
    text_key: str = "text"
    """Field that holds the text (jsonl, csv, parquet); only used by data.name=file."""
    valid_name: str = ""
    """Corpus to validate on; empty: the training corpus' own validation split."""
    valid_share: float = 0.01
    """Share of documents, taken from the end, held out when a corpus has no validation split."""
    tokenizer: str = ""
    """gpt2, bert-base-uncased, text8, bytes, bpe-N, a tokenizer.json, or a folder with vocabulary files; empty: the
    corpus' default."""
    wrap: bool = True
    """Concatenate documents and cut into rows; False: one document a row, truncated and padded."""
    packing: str = "stream"
    """stream: nothing dropped between documents; release: cut as the release does, per 1000 documents."""
    cache_dir: str = ""
    """Where prepared blocks live; empty: $ADLM_CACHE, else ~/.cache/adlm."""
    num_proc: int = 0
    """Threads that tokenise; 0: all cores."""
    max_rows: int = 0
    """Keep only this many rows of each split (0: all), reading no further than needed."""
    root: str = ""
    """Folder with local copies of the public data sets, looked up by corpus (zero-shot evaluation)."""


@dataclass
class OptimConfig:
    name: str = "adamw"
    """adamw, or muon (Muon on the matrices of the blocks, AdamW on the rest)."""
    lr: float = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: float = 2e-3
    """Peak learning rate of Muon, in AdamW-equivalent units."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    beta1: float = 0.9
    """AdamW."""
    beta2: float = 0.999
    """AdamW."""
    eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Largest total gradient norm (0: no clipping)."""
    schedule: str = "constant"
    """After warm-up: constant, cosine or linear (to zero)."""
    warmup: int = 2500
    """Warm-up steps (the learning rate starts at 0)."""
    final: float = 0.0
    """cosine, linear: share of the peak rate left at the last step."""
    ema: float = 0.9999
    """Decay of the averaged weights (0: none); starts low: min(ema, (1+n)/(10+n))."""


@dataclass
class TrainConfig:
    steps: int = 1_000_000
    """Optimizer steps."""
    global_batch_size: int = 512
    """Rows per optimizer step over all ranks."""
    batch_size: int = 0
    """Rows per forward pass and rank; 0: the largest that divides the global batch evenly over ranks."""
    row_pieces: int = 1
    """Pieces that rows are cut into at the start of training, each a row of its own: as many tokens and more times a
    step, and neighbours are learned first."""
    row_pieces_share: float = 0.5
    """Share of the run with rows in pieces."""
    batch_parts: int = 1
    """Parts of a batch of which the first steps take one each: smaller batches, and so more steps, for as many
    tokens."""
    batch_parts_share: float = 0.5
    """Share of the steps with such batches."""
    valid_every: int = 10_000
    """Steps between validations (0: only at the end)."""
    valid_rows: int = 1024
    """Rows of the validation split used during training (0: all)."""
    valid_batch_size: int = 0
    """Rows per forward pass in validation; 0: batch_size."""
    log_every: int = 100
    """Steps between log lines."""
    sample_every: int = 0
    """Steps between samples shown during training (0: none)."""
    precision: str = "auto"
    """auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16 (autocast, fp32 weights)."""
    residual: str = "fp32"
    """Precision of the residual stream under bf16 autocast: fp32, or bf16 (half the memory traffic)."""
    attention: str = "auto"
    """Attention kernel on a GPU: auto (timed at the start), flash, cudnn or any (torch's own choice)."""
    compile: str = "auto"
    """auto (on a GPU), true, false, block (compile one block and reuse it: starts sooner, runs a little slower) or max
    (kernels chosen by timing them: starts minutes later)."""
    cuda_graphs: bool = False
    """Replay the network as CUDA graphs, for small models or batches, where the host is slower than the GPU. One
    process, one micro-batch a step."""
    checkpoint_activations: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more time."""
    strategy: str = "ddp"
    """ddp or fsdp, under torchrun."""
    max_bad_steps: int = 20
    """Stop after this many updates in a row were skipped for a non-finite or exploding gradient."""
    spike_factor: float = 0.0
    """Skip an update whose gradient norm exceeds this many times its running mean (0: only non-finite ones)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    num_threads: int = 0
    """CPU threads; 0: all cores (1 per process under torchrun unless OMP_NUM_THREADS says otherwise)."""


@dataclass
class CheckpointConfig:
    every: int = 500
    """Steps between checkpoints."""
    minutes: float = 0.0
    """Also save after this many minutes since the last save (0: off)."""
    keep: int = 2
    """Newest checkpoints kept."""
    best: bool = True
    """Also save whenever a validation finds a better bound, and keep the best."""
    milestone_every: int = 0
    """Steps between checkpoints that are never removed (0: none)."""
    resume: bool = True
    """Go on from the newest good checkpoint of the run folder."""
    init_from: str = ""
    """Start from the weights of this exported folder (a new run, step 0)."""


@dataclass
class EvalConfig:
    checkpoint: str = ""
    """Run folder, exported folder or release .ckpt to evaluate."""
    draws: int = 4
    """Noise draws per row of the bound; 2 or more also give its Monte Carlo error."""
    estimator: str = "continuous"
    """Of the bound: continuous (random times), exact-count (random numbers of masks, less variance) or both."""
    seed: int = 0
    """Of the evaluation noise; the same for all models, so that their numbers are paired."""
    chain_rows: int = 0
    """Rows also scored from left to right by the same weights, at one pass per token (0: none)."""
    out: str = ""
    """File (json; evaluate: folder) that results are written to; empty: beside the checkpoint."""
    rows: int = 0
    """Rows evaluated (0: all)."""
    ema: bool = True
    """Evaluate the averaged weights."""
    judge: str = "gpt2-large"
    """evaluate: causal model that scores samples: hub name, folder, GGUF file, run of ours, smollm2, or none."""
    judge_rule: str = "text"
    """evaluate: what the judge reads: text (decoded, retokenised), tokens (as drawn; same tokenizer) or release."""
    perplexity_batch_size: int = 8
    """evaluate: texts per forward pass of the judge."""
    mauve: str = "auto"
    """evaluate: auto (where mauve-text is installed and there is data to compare with), true or false."""
    features: str = ""
    """evaluate: model whose last hidden state MAUVE compares; empty: the judge."""
    reference: bool = True
    """evaluate: also measure as many rows of the data (data=NAME; by default the checkpoint's validation split)."""
    samplers: str = ""
    """evaluate: samplers to compare, separated by commas; empty: the one of sampling."""
    steps: str = ""
    """evaluate: numbers of steps to compare, separated by commas; empty: the one of sampling."""
    temperatures: str = ""
    """evaluate: temperatures to compare, separated by commas; empty: the one of sampling."""
    top_ps: str = ""
    """evaluate: nucleus sizes to compare, separated by commas; empty: the one of sampling."""
    release_json: str = ""
    """evaluate: also write the first setting in the format of the public release's sample_eval to this file."""


@dataclass
class SamplingConfig:
    sampler: str = "mdlm"
    """A name of the samplers table (`adlm config sampling.sampler=list`)."""
    steps: int = 256
    """Number of steps T from all masks to none."""
    n: int = 1
    """Samples to draw."""
    length: int = 0
    """Tokens per sample; 0: the model's length."""
    batch_size: int = 16
    """Rows that share a network call."""
    seed: int = 0
    """Sample i uses seed + i."""
    temperature: float = 1.0
    """Divides the logits."""
    top_p: float = 1.0
    """Nucleus: keep the smallest set of tokens with at least this probability."""
    top_k: int = 0
    """Keep the k most probable tokens (0: all)."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most probable one's probability."""
    eta: float = 0.02
    """Remasking strength in [0, 1] (remdm-cap, -rescale, -loop)."""
    t_on: float = 0.55
    """remdm-loop: time at which the remasking phase starts."""
    t_off: float = 0.05
    """remdm-loop: time at which it ends."""
    alpha_on: float = 0.9
    """remdm-loop: share of visible tokens held during that phase; eta*alpha_on <= 1-alpha_on."""
    threshold: float = 0.9
    """confidence: reveal every position at least this sure; entropy: bound on the revealed entropy, in nats."""
    grid: str = ""
    """File of `adlm profile`: short steps where predictions change fast (mdlm, remdm-cap, remdm-rescale)."""
    parity: str = ""
    """release: the public release's nucleus cut, step grid and final argmax; empty: ours."""
    guidance: float = 0.0
    """Classifier-free guidance weight against the canvas without its prompt (0: off)."""
    stride: int = 0
    """Semi-autoregressive: new tokens per window beyond the model's length (0: off)."""
    prompt: str = ""
    """Text that every sample continues."""
    template: str = ""
    """Text with holes to fill: [MASK] is one token, [MASK:3] are three."""
    banned: str = ""
    """Words that must not appear, separated by commas."""
    required: str = ""
    """Words that must appear, separated by commas; each is placed where the model finds it likely."""
    stop: bool = False
    """End each sample at its first end-of-text token."""
    out: str = ""
    """File (jsonl) that samples are appended to as they are drawn; a rerun goes on from it. Empty: only shown."""


@dataclass
class ReasonConfig:
    """Staged fine-tuning on reasoning tasks (`adlm reason`); a stage is epochs_per_stage epochs of one layout."""

    task: str = "prosqa"
    """prosqa, prontoqa or gsm8k."""
    method: str = "acot"
    """cot, no-cot, pause, acot, icot, coconut or coconut-pause."""
    base: str = ""
    """Causal Hugging Face model to start from, by hub name (gpt2), folder or GGUF file; empty: our own stack (section
    model), from scratch."""
    train_path: str = ""
    """Training examples in the task's published format; empty: generated (prosqa, prontoqa)."""
    valid_path: str = ""
    """Validation examples; empty: generated, or the last n_valid of train_path."""
    test_path: str = ""
    """Test files (several: separated by commas), asked beside the generated test set; empty: only that one."""
    n_train: int = 0
    """Training examples generated, or kept of train_path (0: the size of the published set, or the whole file)."""
    n_valid: int = 300
    """Validation examples generated, or kept of valid_path."""
    n_test: int = 500
    """Test examples generated (test_path is always used whole)."""
    hops: int = 0
    """Generated tasks: length of the derivation (0: distributed as in the published files)."""
    nodes: int = 0
    """Generated ProsQA: nodes drawn per graph before isolated ones are dropped (0: as in the published files)."""
    words: int = 0
    """Generated ProsQA: different kinds, and at most as many names, that questions draw from (0: all 38 and 17)."""
    names: int = 0
    """Generated ProsQA: different names that questions draw from (0: as reason.words says)."""
    balanced: bool = False
    """Generated ProsQA: the wrong answer is as deep as the right one (in the published files depth often tells)."""
    terse: bool = False
    """Generated ProsQA: "Tom lempus." for "Tom is a lempus.", and "lempus or zumpus, Tom?"; see docs/reasoning.md."""
    easier: float = 0.0
    """Generated ProsQA: share of the training questions with one hop less than reason.hops and two nodes less than
    reason.nodes, a curriculum by mixing; held-out questions all have reason.hops."""
    recite: int = 0
    """ProsQA from scratch: optimizer steps before the first stage on stories, told again and thought through, which
    teach to look up what was said of a word (a pretrained base can already; 0: none, as in the paper)."""
    recite_rate: float = 1.0
    """Learning rates of these steps over those of the stages: a circuit forms at rates that would later wreck it."""
    epochs: int = 50
    """Passes over the training examples, all stages together."""
    epochs_per_stage: int = 5
    """Passes per stage; the last stage takes what is left of epochs."""
    fresh: bool = False
    """No example is read twice: an epoch is a pass over its own part of the training examples, one in `epochs`."""
    slots: int = 6
    """Most [ANT] positions of an example."""
    slots_per_stage: int = 1
    """[ANT] positions added by each stage."""
    remove_steps: bool = False
    """acot: also remove one more step from the front of the trace at each stage (icot and coconut always do)."""
    anchor_tokens: str = "first"
    """An anchor of several tokens labels one [ANT] with its first token (first), or as many as it has tokens (all)."""
    gamma: float = 1.0
    """Weight of the anchor loss beside the loss of the answer and trace, per token."""
    reset_optimizer: bool = True
    """Start each stage with fresh moments and its own warm-up."""
    valid_every: int = 1
    """Epochs between validations (the end of a stage is always validated); 0: only the end of the run."""
    minutes: float = 0.0
    """Stop training after this many minutes and test what there is, as its stage answers (0: no limit)."""
    max_new_tokens: int = 0
    """Longest answer generated, in tokens; 0: one and a half times the longest of the training examples."""
    eval_batch_size: int = 128
    """Questions answered together."""
    row_multiple: int = 0
    """Training rows are padded to a multiple of this many positions (0: 128 on a GPU, where every shape is compiled for
    itself, else 1)."""


@dataclass
class ServeConfig:
    """`adlm serve`: where it listens and what one client may ask for. sampling.* are the defaults of requests."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface (then set a key)."""
    port: int = 8000
    """TCP port (0: any free one, printed at the start)."""
    api_key: str = ""
    """Key that requests must carry as `Authorization: Bearer KEY`; empty: $ADLM_API_KEY, or none."""
    cors: str = ""
    """Origins whose pages may call the server, separated by commas (* for all); empty: none but its own page."""
    slots: int = 32
    """Rows of a model that share network calls."""
    queue: int = 256
    """Rows that may wait for a slot; beyond, requests are answered 429."""
    max_length: int = 0
    """Longest row of a request in tokens; 0: the model's length."""
    max_steps: int = 4096
    """Most steps of a request."""
    max_n: int = 16
    """Most rows of a request (n times prompts)."""
    max_body: int = 1_000_000
    """Largest request body in bytes."""
    timeout: float = 300.0
    """Seconds a request may take, waiting included."""
    read_timeout: float = 10.0
    """Seconds a client may take to send a request."""
    grace: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C, before they are cancelled."""


@dataclass
class BenchConfig:
    """How fast this machine is (`adlm bench`); model, optimizer, sampler and precision come from their sections."""

    batches: str = "16"
    """Rows of a step, one measurement each: 1,16,64."""
    steps: int = 20
    """train: optimizer steps timed."""
    warmup: int = 5
    """Steps (train) or network evaluations (sample) before the clock starts."""
    evaluations: int = 60
    """sample: network evaluations timed (0: rows are drawn to their end)."""
    dense: bool = True
    """Also time the dense twin, and print the ratio."""
    dense_steps: int = 3
    """Steps of the dense twin timed."""
    vocab_size: int = 50258
    """Vocabulary, mask included (50258: GPT-2's)."""
    out: str = ""
    """File that the JSON line is appended to; empty: only printed."""


@dataclass
class CompareConfig:
    jobs: int = 1
    """Runs of `adlm compare` that train at once, each in a process of its own."""


@dataclass
class TrackConfig:
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder."""
    wandb: bool = False
    """Also log to Weights & Biases (offline unless logged in)."""
    project: str = "adlm"
    """wandb project."""
    name: str = ""
    """wandb run name."""


@dataclass
class Config:
    """The whole tree, as `adlm config` prints it."""

    algo: str = "adlm"
    """Label of the algorithm; the group of that name sets model and objective."""
    mode: str = "train"
    """What the release's shims do: train, ppl_eval or sample_eval."""
    seed: int = 1
    """Seed of initialisation, data order and noise."""
    out: str = ""
    """Run folder; empty: runs/<algo>-<data>-<model>."""
    model: ModelConfig = field(default_factory=ModelConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reason: ReasonConfig = field(default_factory=ReasonConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    track: TrackConfig = field(default_factory=TrackConfig)


def quoted(value: Any) -> str:
    """A value as YAML: JSON but for its escapes, since JSON's two for a character beyond U+FFFF are two characters in
    YAML. ASCII, so that no encoding matters."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\x7f")
    return text.encode("ascii", "backslashreplace").decode()


def as_yaml(cfg: Config) -> str:
    """The whole tree as YAML text; `config.from_yaml` reads it back."""

    def lines(tree: dict[str, Any], indent: str) -> list[str]:
        out = []
        for name, value in tree.items():
            if isinstance(value, dict):
                out += [f"{indent}{name}:", *lines(value, indent + "  ")]
            else:
                out.append(f"{indent}{name}: {quoted(value)}")
        return out

    return "\n".join(lines(asdict(cfg), "")) + "\n"

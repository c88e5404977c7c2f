"""Every setting of the package, with its meaning, its unit and the rule its value obeys: plain dataclasses.

Lower layers take one section (`build_model(cfg.model, ...)`), never the whole tree; `config.py` fills the tree from
YAML groups and the command line. Classes stay mutable because OmegaConf composes onto them; treat them as read-only
after `config.load`. The string under a field is its help text. `check` holds the rules that join several fields.
"""

from dataclasses import dataclass, field
from typing import Annotated

from adlm import tables
from adlm.errors import require
from adlm.rules import (
    AtLeastOne,
    Choices,
    Count,
    Fraction,
    FractionBelowOne,
    InnerFraction,
    NotNegative,
    Numbers,
    Place,
    Positive,
    PositiveFraction,
    Range,
    Seed,
    WholeNumber,
    numbers,
)
from adlm.schema_commands import (
    BenchConfig,
    ClusterConfig,
    CompareConfig,
    EvalConfig,
    ReasonConfig,
    SamplingConfig,
    ServeConfig,
)

# ---- the network -----------------------------------------------------------------------------------------------------
# The settings of a network: what shape it has, and which adapters it trains.


@dataclass
class ModelConfig:
    """One transformer family: plain or anchored, bidirectional or causal, published block or modern block."""

    hidden_size: Count = 768
    """Width D of the residual stream."""
    n_heads: Count = 12
    """Attention heads; must divide hidden_size into an even head width, unless head_size gives that."""
    n_kv_heads: WholeNumber = 0
    """Heads of keys and values, each shared by n_heads / n_kv_heads heads of queries; 0: as many as n_heads."""
    head_size: WholeNumber = 0
    """Width of a head; 0: hidden_size / n_heads."""
    n_blocks: Count = 12
    """Blocks before the anchors are read (all blocks, when not anchored)."""
    n_denoiser_blocks: WholeNumber = 6
    """Blocks after the anchors are read; ignored when not anchored. The paper uses half of n_blocks."""
    length: Annotated[int, Range(low=4)] = 1024
    """Longest sequence in tokens."""
    dropout: FractionBelowOne = 0.1
    """Dropout probability on the output of attention and MLP, in training."""
    anchored: bool = True
    """Two stages: an anchor network whose prediction feeds a denoiser."""
    bridge: Annotated[str, Choices(tables.BRIDGES)] = "linear"
    """How anchors reach the denoiser: linear (the paper's: the denoiser reads a linear map of the anchor logits), none
    (it continues the residual stream, anchors only appear in the loss)."""
    causal: bool = False
    """Attention to the past only (AR, A2R)."""
    block_length: Annotated[str, Numbers()] = ""
    """Block diffusion: tokens K of a block, which is denoised after the blocks before it (1: token by token; 0 or
    empty: the whole sequence at once). Of several, 16,1,4,64,1024, each training sequence takes one in turn, and the
    first is the model's own K in bounds and generation; a length listed twice is used twice as often."""
    conditioning: Annotated[str, Choices(("none", "constant", "sigma", "t"))] = "constant"
    """Input of the adaLN modulation of norms and gates: none (no adaLN), constant (one learned vector, as in the
    published block), sigma (the noise level sigma(t)) or t (the fraction of masks, GIDD)."""
    cond_dim: Count = 128
    """Width of the conditioning vector."""
    norm: Annotated[str, Choices(("layernorm", "rmsnorm"))] = "layernorm"
    """layernorm or rmsnorm."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    norm_eps: Annotated[float, Range(low=0, high=0.1)] = 0.0
    """What a norm adds to the mean square; 0: 1e-5 (layernorm) or 1e-6 (rmsnorm)."""
    activation: Annotated[str, Choices(("gelu", "relu2", "swiglu"))] = "gelu"
    """MLP activation: gelu (tanh form), relu2 (squared ReLU) or swiglu (silu of one half times the other)."""
    bias: bool = True
    """Biases in MLP, heads and bridge."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    rope_base: AtLeastOne = 10000.0
    """Base of the rotary frequencies."""
    tied: bool = False
    """Tie the heads to the embedding, the anchor network's head too; needs bias=false, and bridge=none if anchored."""
    shift: bool = False
    """The prediction for position i is read at position i-1 (for position 0, at 0), as in diffusion models made from
    causal ones. Causal models always do this."""
    mlp_size: WholeNumber = 0
    """Width of the MLP; 0: 4 * hidden_size."""
    init: Annotated[str, Choices(("torch", "normal", "normal-zero"))] = "torch"
    """How weights start: torch (uniform +-1/sqrt(fan-in), heads at zero, as published), normal (standard deviation
    0.02) or normal-zero (the same, but output projections of attention and MLP at zero; under adaLN gates are zero
    instead)."""

    @property
    def has_adaln(self) -> bool:
        return self.conditioning != "none"

    @property
    def is_time_conditioned(self) -> bool:
        return self.conditioning in ("sigma", "t")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_size or self.hidden_size // self.n_heads

    @property
    def mlp_width(self) -> int:
        return self.mlp_size or 4 * self.hidden_size

    @property
    def mlp_rows(self) -> int:
        """Outputs of the first map of the MLP: two halves under swiglu."""
        return (2 if self.activation == "swiglu" else 1) * self.mlp_width

    def check(self) -> None:
        """Refuse values that do not fit together."""
        require(
            self.head_size > 0 or self.hidden_size % (2 * self.n_heads) == 0,
            f"model.n_heads={self.n_heads} must split model.hidden_size={self.hidden_size} into heads of even width",
        )
        require(self.head_size % 2 == 0, f"model.head_size={self.head_size} must be even")
        require(
            self.n_heads % self.kv_heads == 0,
            f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}",
        )
        require(
            not (self.tied and (self.bias or (self.anchored and self.bridge != "none"))),
            "model.tied=true needs model.bias=false, and model.bridge=none if anchored: an embedding has no bias, and"
            " another bridge reads a head of its own",
        )
        require(
            not (self.shift and self.causal),
            "model.shift=true needs model.causal=false: a causal model predicts the next token in any case",
        )
        require(
            not self.anchored or self.n_denoiser_blocks >= 1,
            "model.n_denoiser_blocks=0 leaves no denoiser: give at least 1, or model.anchored=false",
        )
        require(
            not (self.causal and self.is_time_conditioned),
            f"model.causal=true has no noise level for model.conditioning={self.conditioning}: choose none or constant",
        )
        require(
            not (self.causal and self.block_length),
            f"model.block_length={self.block_length} needs model.causal=false: a causal model has blocks of one token",
        )
        require(
            not (self.block_lengths and self.is_time_conditioned),
            f"model.block_length={self.block_length}: every block has a noise level of its own, which"
            f" model.conditioning={self.conditioning} cannot tell apart",
        )

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """The block lengths K that the model is trained for, first that of bounds and generation unless another one is
        asked for; empty: the whole sequence, always."""
        found = numbers(self.block_length)
        return tuple(min(K or self.length, self.length) for K in found) if any(found) else ()


@dataclass
class LoraConfig:
    """Low-rank adapters: a matrix W of the blocks becomes W + (16 / rank) B A, and only B and A train."""

    rank: WholeNumber = 0
    """Rank of the adapters of a model that is fine-tuned (checkpoint.init_from); 0: all of its weights train."""


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass
class NoiseConfig:
    name: Annotated[str, Choices(tables.SCHEDULES)] = "loglinear"
    """Masking schedule: loglinear, linear, geometric, cosine or cosine-squared."""
    eps: FractionBelowOne = 1e-3
    """Smallest kept probability at t=1 (loglinear, cosine, ...)."""
    sigma_min: Positive = 1e-4
    """Geometric schedule: sigma at t=0."""
    sigma_max: Positive = 20.0
    """Geometric schedule: sigma at t=1."""

    def check(self) -> None:
        """Refuse values that no schedule can be made from together."""
        require(
            self.sigma_min < self.sigma_max,
            f"noise.sigma_min={self.sigma_min} must be below noise.sigma_max={self.sigma_max}",
        )


@dataclass
class ObjectiveConfig:
    name: Annotated[str, Choices(tables.OBJECTIVES)] = "anelbo"
    """anelbo, nelbo, d3pm, score-entropy or autoregressive."""
    gamma: NotNegative = 3e-3
    """Weight of the anchor term (0: plain NELBO through both stages)."""
    gamma_warmup: Fraction = 3e-3
    """Fraction of the run over which gamma rises linearly from 0 (0: constant)."""
    gamma_until: PositiveFraction = 1.0
    """Fraction of the run after which the anchor loss is off and the anchor head costs nothing (1: anchors to the
    end)."""
    causal_until: FractionBelowOne = 0.0
    """Fraction of the run in which the network first learns to predict the next token: it reads clean sequences, every
    position sees those before it, and there are no anchors yet (0: masks from the first step on). Causal models do so
    in any case."""
    anchor_rule: Annotated[str, Choices(tables.ANCHOR_RULES)] = "count"
    """Which tokens are anchors: count (at most tau times in its sequence), common (more often), all or none; given: the
    task names them (docs/reasoning.md)."""
    tau: Count = 5
    """count rule: a token is an anchor if it occurs at most tau times in its own sequence (common rule: more often)."""
    anchor_positions: Annotated[str, Choices(("all", "masked"))] = "all"
    """all: every anchor carries the anchor loss (the release); masked: only masked ones."""
    anchor_fraction: PositiveFraction = 1.0
    """Random fraction of the anchors that is scored at each step: 0.25 costs a quarter, and the anchor loss stays right
    on average."""
    T: WholeNumber = 0
    """Number of discrete time steps of the bound; 0 is continuous time."""
    time_density: AtLeastOne = 1.0
    """Training times are drawn from Beta(a, a); a falls from this to 1, the bound's uniform times, over the first 0.8
    of the run (1: uniform throughout)."""
    sampling_eps: FractionBelowOne = 1e-3
    """Smallest time visited."""

    def check(self, model: ModelConfig) -> None:
        """Refuse values that do not fit each other or the model. An objective of another package is loaded, and asked:
        it states its own rules."""
        if self.name not in tables.OBJECTIVES.entries:
            return tables.OBJECTIVES.load(self.name, "objective.name").check(self, model)
        require(
            (self.name == "autoregressive") == model.causal,
            f"objective.name={self.name} does not fit model.causal={str(model.causal).lower()}: "
            + ("autoregressive needs a causal model (algo=ar or a2r)" if not model.causal
               else "a causal model needs objective.name=autoregressive"),
        )  # fmt: skip
        require(
            self.name != "anelbo" or model.anchored,
            "objective.name=anelbo needs model.anchored=true (algo=adlm); without anchors choose objective.name=nelbo",
        )
        require(
            self.name not in ("d3pm", "score-entropy") or not model.anchored,
            f"objective.name={self.name} is a baseline without anchors: set model.anchored=false (algo=d3pm or sedd)",
        )
        require(
            self.name != "d3pm" or self.T >= 1,
            "objective.name=d3pm is a discrete-time bound: set objective.T, e.g. 1000",
        )
        require(
            self.T == 0 or self.name in ("nelbo", "d3pm"),
            f"objective.T={self.T} (discrete time) exists for nelbo and d3pm; objective.name={self.name} needs"
            " objective.T=0",
        )
        require(
            self.name != "anelbo" or self.gamma == 0 or self.gamma_until > self.causal_until,
            f"objective.gamma_until={self.gamma_until} must be above objective.causal_until={self.causal_until}: causal"
            " steps have no anchors",
        )
        require(
            not (model.block_lengths or model.shift) or (self.name in ("nelbo", "anelbo") and self.T == 0),
            f"model.block_length={model.block_length!r}, model.shift={str(model.shift).lower()}: block diffusion and"
            f" shifted outputs exist for nelbo and anelbo in continuous time, not for {self.name}, T={self.T}",
        )


@dataclass
class DataConfig:
    name: Annotated[str, Choices(tables.CORPORA)] = "pydocs"
    """A name of the corpora table (`adlm data list`); `file` reads data.path."""
    path: Place = ""
    """File or folder in the corpus' published format, or a URL of one (s3://bucket/texts); empty: the hub, or the
    embedded corpus."""
    valid_path: Place = ""
    """Local file or folder of the validation split; empty: held out of `path`."""
    text_key: str = "text"
    """Field that holds the text (jsonl, csv, parquet); only used by data.name=file."""
    valid_name: Annotated[str, Choices(tables.CORPORA, also=("",))] = ""
    """Corpus to validate on; empty: the training corpus' own validation split."""
    valid_fraction: InnerFraction = 0.01
    """Fraction of the documents, taken from the end, held out when a corpus has no validation split."""
    tokenizer: str = ""
    """gpt2, bert-base-uncased, text8, bytes, bpe-N (trained on the corpus), a tokenizer.json, or a folder with
    vocabulary files; empty: the corpus' default."""
    packing: Annotated[str, Choices(("stream", "release", "documents"))] = "stream"
    """How documents become sequences: stream (concatenated and cut, nothing dropped between them), release (the same
    for each 1000 documents, whose rest is dropped, as in the release) or documents (one a sequence, truncated and
    padded)."""
    cache_dir: Place = ""
    """Folder for prepared sequences; empty: $ADLM_CACHE, else ~/.cache/adlm."""
    engine: Annotated[str, Choices(("threads", "ray"))] = "threads"
    """Who tokenises: threads of this machine, or ray: the cluster of RAY_ADDRESS, or one that is started here."""
    max_sequences: WholeNumber = 0
    """Keep only this many sequences of each split (0: all), reading no further than needed."""
    root: Place = ""
    """Folder with local copies of the public data sets, looked up by corpus (zero-shot evaluation)."""


@dataclass
class OptimConfig:
    name: Annotated[str, Choices(("adamw", "muon"))] = "adamw"
    """adamw, or muon (Muon on the matrices of the blocks, AdamW on the rest)."""
    lr: Positive = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: Positive = 2e-3
    """Peak learning rate of Muon, in AdamW-equivalent units."""
    beta1: FractionBelowOne = 0.9
    """AdamW."""
    beta2: FractionBelowOne = 0.999
    """AdamW."""
    eps: Positive = 1e-8
    """AdamW."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of matrices: norms, biases and modulations are left alone (reasoning tasks: of everything,
    as published)."""
    clip: NotNegative = 1.0
    """Largest total gradient norm (0: no clipping)."""
    schedule: Annotated[str, Choices(("constant", "cosine", "linear"))] = "constant"
    """After warm-up: constant, cosine or linear (to zero)."""
    warmup: WholeNumber = 2500
    """Warm-up steps (the learning rate starts at 0)."""
    min_lr_ratio: Fraction = 0.0
    """cosine, linear: fraction of the peak rate left at the last step."""
    ema: FractionBelowOne = 0.9999
    """Decay of the EMA of the weights (0: none); starts low: min(ema, (1+n)/(10+n))."""


@dataclass
class TrainConfig:
    steps: Count = 1_000_000
    """Optimizer steps."""
    global_batch_size: Count = 512
    """Sequences per optimizer step over all ranks."""
    batch_size: WholeNumber = 0
    """Most sequences per forward pass and rank, also in validation; 0: all that a rank has of the global batch. Ranks
    that cannot share it evenly differ by one sequence."""
    length_warmup: Count = 1
    """Sequence-length warmup: at the start every sequence is cut into this many shorter ones. A step then has the same
    tokens and more noise levels (1: none)."""
    length_warmup_fraction: Fraction = 0.5
    """Fraction of the run with the shorter sequences."""
    valid_every: WholeNumber = 10_000
    """Steps between validations (0: only at the end)."""
    valid_sequences: WholeNumber = 1024
    """Sequences of the validation split used during training (0: all)."""
    log_every: Count = 100
    """Steps between log lines."""
    sample_every: WholeNumber = 0
    """Steps between samples shown during training (0: none)."""
    track: Annotated[str, Choices(("tensorboard", "wandb"), also=("",))] = ""
    """Where else metrics go: tensorboard (event files in the run folder) or wandb (Weights & Biases, offline unless
    logged in; WANDB_PROJECT and WANDB_NAME name the run); empty: only the run folder."""
    precision: Annotated[str, Choices(("auto", "fp32", "bf16"))] = "auto"
    """auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16 (autocast, fp32 weights)."""
    residual: Annotated[str, Choices(("fp32", "bf16"))] = "fp32"
    """Precision of the residual stream under bf16 autocast: fp32, or bf16 (half the memory traffic)."""
    compile: Annotated[str, Choices(("auto", "true", "false", "block", "max"))] = "auto"
    """auto (on a GPU), true, false, block (compile one block and reuse it: starts sooner, runs a little slower) or max
    (autotune kernels: starts minutes later)."""
    cuda_graphs: bool = False
    """Replay the network as CUDA graphs, for small models or batches, where the host is slower than the GPU. One
    process, one micro-batch a step."""
    checkpoint_activations: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more time."""
    strategy: Annotated[str, Choices(("ddp", "fsdp", "hsdp"))] = "ddp"
    """Under torchrun: ddp (every rank has all weights), fsdp (shards over all ranks) or hsdp (shards over the ranks of
    a node, copies of them over nodes)."""
    device: str = "auto"
    """auto (the best available), cpu, cuda, cuda:N or mps (Apple's GPUs)."""
    num_threads: Annotated[int, Range(low=0, high=1024)] = 0
    """CPU threads, for tokenising too, or processes of a Ray cluster started here; 0: all cores (under torchrun 1 per
    process, except for tokenising, unless OMP_NUM_THREADS is set)."""

    @property
    def is_sharded(self) -> bool:
        return self.strategy != "ddp"

    def at_once(self, ranks: int) -> int:
        """Most sequences that one of so many ranks has in a forward pass."""
        return self.batch_size or -(-self.global_batch_size // ranks)

    def micro_batches(self, ranks: int) -> int:
        """Forward passes of an optimizer step, the same on each of so many ranks: sharded ones gather together. No
        rank has an empty one; with batch_size=1 one of two sequences instead, where ranks share unevenly."""
        most, least = -(-self.global_batch_size // ranks), self.global_batch_size // ranks
        return min(-(-most // self.at_once(ranks)), least)


@dataclass
class CheckpointConfig:
    every: Count = 500
    """Steps between checkpoints."""
    keep: Count = 2
    """Newest checkpoints kept."""
    best: bool = True
    """Also save whenever a validation finds a better bound, and keep the best."""
    resume: bool = True
    """Resume from the newest valid checkpoint of the run folder."""
    init_from: Place = ""
    """Start a new run from the weights of this exported folder, or from a checkpoint of another run
    (RUN/checkpoints/step-00000600): from its weights, EMA, optimizer and step, with other settings."""
    url: str = ""
    """Keep checkpoints there, for nodes that share no disk: any URL of fsspec (s3://bucket/run, file:///disk/run);
    empty: checkpoints/ in the run folder."""


@dataclass
class Config:
    """The whole tree, as `adlm config` prints it."""

    algo: Annotated[str, Choices(tables.ALGORITHMS)] = "adlm"
    """Label of the algorithm; the group of that name sets model and objective."""
    seed: Seed = 1
    """Seed of initialisation, data order and noise."""
    out: Place = ""
    """Where the command writes. Training: the run folder (empty: runs/<algo>-<data>-<model>). The --help of other
    commands says what it is."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

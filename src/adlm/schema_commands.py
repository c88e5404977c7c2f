"""Settings of the commands that use a model: evaluation, sampling, reasoning, serving, benchmarks, comparisons.

The second half of schema.py, which has the first and the whole tree, and says how fields and rules are written.
"""

from dataclasses import dataclass
from typing import Annotated

from adlm import tables
from adlm.errors import require
from adlm.rules import (
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
)

JUDGE_RULES = {
    "text": "decoded, each text of a sequence retokenised by the judge after its begin-of-text token; all tokens of it"
    " scored",
    "tokens": "the sequence as drawn, without retokenisation; all tokens but the first scored",
    "release": "the public release's: decoded with end tokens by name, retokenised, truncated to the model's length;"
    " all tokens but the first scored, end tokens after the first one excepted",
}
"""What the judge reads, by name; stated with every result, since the number depends on it."""


GPT2_VOCABULARY = 50258
"""GPT-2's tokens and the mask."""


@dataclass
class EvalConfig:
    checkpoint: Place = ""
    """Run folder, exported folder or release .ckpt to evaluate."""
    draws: Count = 4
    """Noise draws per sequence of the bound; 2 or more also give its Monte Carlo error."""
    estimator: Annotated[str, Choices(("auto", "continuous", "exact-count", "both"))] = "auto"
    """Of the bound: continuous (random times), exact-count (random numbers of masks, less variance) or both; auto:
    exact-count for block diffusion, where K = 1 then has no noise at all, continuous for the others."""
    block_length: Annotated[str, Numbers()] = ""
    """ppl: block lengths K of the bound, one bound each: 1,4,16,64,1024 (0: the whole sequence; empty: the model's
    own)."""
    sequences: WholeNumber = 0
    """Sequences evaluated (0: all)."""
    ema: bool = True
    """Evaluate the EMA of the weights; false: the weights themselves."""
    judge: str = "gpt2-large"
    """evaluate: causal model that scores samples: hub name, folder, GGUF file, run of ours, smollm2, or none."""
    judge_rule: Annotated[str, Choices(JUDGE_RULES)] = "text"
    """evaluate: what the judge reads: text (decoded, retokenised), tokens (as drawn; same tokenizer) or release."""
    batch_size: WholeNumber = 0
    """Sequences per forward pass; 0: as many as fit easily (ppl, zeroshot), 8 (evaluate's judge), 128 (reason)."""


@dataclass
class SamplingConfig:
    sampler: Annotated[str, Choices(tables.SAMPLERS, also=("",))] = ""
    """A name of the samplers table (`adlm config sampling.sampler=list`); empty: the model's own, which is mdlm, or
    confidence (models that write in blocks), score (sedd), ddpm (d3pm), autoregressive (ar, a2r)."""
    steps: Count = 256
    """Number of steps T from all masks to none; for each block in block diffusion."""
    block_length: WholeNumber = 0
    """Tokens of a block, for models trained with model.block_length: text is written block after block, with a cache
    (0: the model's own, or the whole canvas where a template needs it)."""
    n: Count = 1
    """Samples to draw."""
    length: WholeNumber = 0
    """Tokens per sample; 0: the model's length, or what its export says."""
    batch_size: Count = 32
    """Sequences that share a network call; for a server, those of each model and worker."""
    seed: Seed = 0
    """Decides every random choice; sample i uses seed + i."""
    temperature: Annotated[float, Range(low=0, high=3e38)] = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: PositiveFraction = 1.0
    """Nucleus: keep the smallest set of tokens with at least this probability."""
    top_k: Annotated[int, Range(low=0, high=1 << 31, open_high=True)] = 0
    """Keep the k most probable tokens (0: all)."""
    min_p: FractionBelowOne = 0.0
    """Keep tokens with at least this fraction of the most probable one's probability."""
    eta: Fraction = 0.02
    """Remasking strength in [0, 1] (remdm-cap, -rescale, -loop)."""
    t_on: InnerFraction = 0.55
    """remdm-loop: time at which the remasking phase starts."""
    t_off: InnerFraction = 0.05
    """remdm-loop: time at which it ends."""
    alpha_on: InnerFraction = 0.9
    """remdm-loop: fraction of visible tokens held during that phase; eta*alpha_on <= 1-alpha_on."""
    threshold: Annotated[float, Range(low=0, also=-1)] = -1.0
    """confidence: reveal every position whose probability is at least this (-1: 0.9); entropy: bound on the revealed
    entropy, in nats (-1: 0.2)."""
    parity: Annotated[str, Choices(("", "release"))] = ""
    """release: the public release's nucleus (top-p) filter, step grid and final argmax; empty: ours."""
    stride: WholeNumber = 0
    """Semi-autoregressive: new tokens per window beyond the model's length (0: off)."""
    prompt: str = ""
    """Text that every sample continues."""
    template: str = ""
    """Text with holes to fill: [MASK] is one token, [MASK:3] are three."""
    banned: str = ""
    """Words that must not appear, separated by commas."""
    required: str = ""
    """Words that must appear, separated by commas; each is placed where the model finds it likely."""
    regex: str = ""
    """What fills the holes, from the first to the last, must match this regular expression (Rust's syntax)."""
    choices: str = ""
    """What fills the holes must be one of these texts, separated by commas."""
    response_format: str = ""
    """What fills the holes must be JSON: a schema, a file that holds one, or json_object."""
    stop: bool = False
    """End each sample at its first end-of-text token."""

    def check(self) -> None:
        """Refuse values that are valid one by one, but not together. A sampler of another package is loaded, and asked:
        it states its own rules in `Sampler.check`."""
        if self.sampler and self.sampler not in tables.SAMPLERS.entries:
            tables.SAMPLERS.load(self.sampler, "sampling.sampler").check(self)
        if self.sampler != "remdm-loop":
            return
        require(
            self.t_off < self.t_on,
            f"sampling.t_off={self.t_off} must lie below sampling.t_on={self.t_on} for remdm-loop",
        )
        require(
            self.eta * self.alpha_on <= 1 - self.alpha_on + 1e-12,
            f"sampling.eta={self.eta} re-masks more than is revealed: remdm-loop needs eta * alpha_on <= 1 - alpha_on, "
            f"so sampling.eta <= {(1 - self.alpha_on) / self.alpha_on:.4g} at sampling.alpha_on={self.alpha_on}",
        )


@dataclass
class ReasonConfig:
    """Staged fine-tuning on reasoning tasks (`adlm reason`); a stage is epochs_per_stage epochs of one layout. Examples
    in the task's published format are read from data.path and data.valid_path; without them they are generated."""

    task: Annotated[str, Choices(tables.TASKS)] = "prosqa"
    """The questions: a name of the tasks table, which also says how they are generated."""
    method: Annotated[str, Choices(tables.METHODS)] = "acot"
    """How examples are laid out, stage by stage: a name of the methods table."""
    base: str = ""
    """Causal Hugging Face model to start from, by hub name (gpt2), folder or GGUF file; empty: our own stack (section
    model), from scratch."""
    test_path: str = ""
    """Test files, or names of tasks whose questions are generated (several: separated by commas), asked beside the
    generated test set; empty: only that one."""
    n_train: WholeNumber = 0
    """Training examples generated, or kept of data.path (0: the size of the published set, or the whole file)."""
    n_valid: Count = 300
    """Validation examples generated, or kept of data.valid_path (without one: the last of data.path)."""
    n_test: WholeNumber = 500
    """Test examples generated (test_path is always used whole)."""
    story_steps: WholeNumber = 0
    """ProsQA from scratch: optimizer steps on stories before the first stage. They teach the model to look up what was
    said of a word, which a pretrained base can already do (0: none, as in the paper)."""
    epochs: Count = 50
    """Passes over the training examples, all stages together."""
    epochs_per_stage: Count = 5
    """Passes per stage; the last stage takes the remaining epochs. Every stage ends with a validation, in addition to
    those of train.valid_every."""
    mixing: FractionBelowOne = 0.0
    """Fraction of a stage's examples that have the layout of an earlier stage, drawn uniformly (0: none)."""
    stage0: Place = ""
    """Folder for the weights after the first stage, reused by other methods with the same first stage (empty: none)."""
    slots: WholeNumber = 6
    """Most [ANT] positions of an example."""
    anchor_tokens: Annotated[str, Choices(("first", "all"))] = "first"
    """Labels for an anchor of several tokens: its first token on one [ANT] (first), or one [ANT] for each token
    (all)."""


@dataclass
class ServeConfig:
    """`adlm serve`: where it listens and what one client may ask for. sampling.* are the defaults of requests, but
    for sampling.batch_size, which is the server's."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface (then set a key)."""
    port: Annotated[int, Range(low=0, high=65535)] = 8000
    """TCP port (0: any free one, printed at the start)."""
    api_key: str = ""
    """Key that requests must carry as `Authorization: Bearer KEY`; empty: $ADLM_API_KEY, or none."""
    cors: str = ""
    """Origins whose pages may call the server, separated by commas (* for all); empty: none but its own page."""
    workers: WholeNumber = 0
    """Worker processes behind the port, each with all models; 0: one for each GPU."""
    queue: Count = 256
    """Sequences that may wait beyond sampling.batch_size; further requests are answered 429."""
    max_length: WholeNumber = 0
    """Longest sequence of a request in tokens; 0: the model's length."""
    max_steps: Count = 4096
    """Most steps of a request; also bounds n x length x steps (docs/serving.md)."""
    max_n: Count = 16
    """Most sequences of a request (n times prompts); also bounds n x length x steps."""
    timeout: Positive = 300.0
    """Seconds a request may take, waiting included."""
    grace: NotNegative = 30.0
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C, before they are cancelled."""


@dataclass
class BenchConfig:
    """How fast this machine is (`adlm bench`); model, optimizer, sampler and precision come from their sections, the
    size of the vocabulary from data.tokenizer (empty: GPT-2's)."""

    batches: str = "16"
    """Batch sizes in sequences, one measurement each: 1,16,64."""
    steps: Count = 20
    """Steps timed: optimizer steps (train) or network evaluations (sample)."""
    dense: bool = True
    """Also time the reference implementation, and print the ratio."""


@dataclass
class ClusterConfig:
    """GPUs that are not here, for the prediction of `adlm train --dry-run gpus=64`."""

    gpus: WholeNumber = 0
    """GPUs of the run, in nodes of 8 (0: nothing is predicted)."""
    gpu: str = "h200"
    """A GPU by name, or a file that `adlm bench train bench.batches=16,64 out=FILE` wrote on that GPU; the file may
    also state link speeds and failures (docs/scale.md)."""


@dataclass
class CompareConfig:
    jobs: Count = 1
    """Runs of `adlm compare` that train at once, each in its own process."""
    equal_flops: bool = False
    """Give every run the training FLOPs of the first one instead of its number of steps."""

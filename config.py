"""The options of minigrpo.py: names, defaults, the command line, and what does not go together.

    c = parse(["--model", "Qwen/Qwen2.5-1.5B-Instruct", "--data", "gsm8k.jsonl"])
    check(c)                                     # ValueError: a value with which no run makes sense

Every field of `Config` is an option of the same name. The names are TRL's where TRL has the option. This file
needs no torch, so that `--help` and a mistake are answered at once.
"""

import argparse
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ABOVE_0 = 1e-30  # the least value of an option that must be above 0; fp32 can still hold it


def option(default, text, **limits):
    """text: for --help. limits: `choices`, or `low` and `high` of a number. Without `low` an integer must be
    1 or more, a fraction above 0; where the default is 0, 0 is allowed too."""
    return dataclasses.field(default=default, metadata={"help": text, **limits})


@dataclass
class Config:
    """The command line."""

    # what to train on
    model: str = option("tiny", "a folder with a Hugging Face checkpoint, or a hub id; tiny is built in")
    data: list[str] = option(
        ("digits",), "prompts: files, or built in: digits (single-digit sums), sums (two-digit)")
    eval_data: list[str] = option(
        (), "files of prompts to evaluate on; built-in tasks bring their own")
    reward: list[str] = option(
        ("gsm8k",), "reward functions: built-in names or file.py:function; the first one is also the "
        "accuracy at evaluation")
    reward_weights: list[float] = option((), "one weight for each reward function (default 1)")
    reward_timeout: float = option(
        30.0, "seconds that scoring one group may take before it is killed", high=1e6)
    reward_workers: int = option(
        1, "processes that score on a rank; 0: the trainer's own", low=0, high=1024)
    system_prompt: str = option("", "put before every prompt as a system message")
    chat_template: str = option("", "a jinja file that replaces the model's chat template")
    chat_template_kwargs: str = option(
        "", "keywords for the template, as JSON: {\"enable_thinking\": false}")
    prompt_column: str = option(
        "", "column of the data file that holds the prompt (default: recognised)")
    answer_column: str = option("", "column that holds the gold answer (default: recognised)")
    max_prompt_length: int = option(512, "tokens; longer prompts are dropped at load, and counted")

    # rollouts
    colocate: bool = option(
        False, "a vLLM engine on every rank; without it the policy samples for itself")
    split: bool = option(False, "the last rank only generates, the others only train; to compare with")
    replay: str = option("", "a run's folder: trains on its rollouts; no engine, no evaluation")
    prompts_per_step: int = option(16, "prompts a step, over all ranks")
    num_generations: int = option(
        8, "completions a prompt: the group that a completion is compared with, best 8 or 16", low=2)
    max_completion_length: int = option(256, "tokens; a completion without EOS is cut here")
    stop: list[str] = option(
        (), "texts that end a completion, e.g. </answer>; they train like the rest")
    dynamic_sampling_rounds: int = option(
        0, "replace groups whose rewards all agree, up to so many times (DAPO); when most are all right or "
        "all wrong", high=64)
    temperature: float = option(
        1.0, "divides the logits, in the sampler and in the trainer; best 0.7 to 1.0", low=0.01)
    vllm_gpu_memory_utilization: float = option(
        0.3, "share of the card that the awake engine may use; it takes less where the batch's KV cache is "
        "smaller", low=0.01, high=0.99)
    vllm_enforce_eager: bool = option(False, "no CUDA graphs: starts sooner, generates slower")

    # the loss
    loss_type: str = option(
        "dapo", "the loss, and how tokens are averaged; cispo weighs instead of clipping")
    num_iterations: int = option(
        1, "passes over each batch; more than 1 uses costly rollouts again", high=64)
    num_minibatches: int = option(1, "optimizer steps a pass; at most prompts_per_step")
    epsilon: float = option(
        0.2, "lower clip of the probability ratio, 1 - epsilon; clips act from the second update of a batch "
        "on")
    epsilon_high: float = option(
        0.0, "upper clip, 1 + epsilon_high; 0 takes epsilon. cispo: the cap itself")
    delta: float = option(0.0, "caps the ratio also where the advantage is negative; 0: does not")
    importance_sampling_level: str = option(
        "token", "what has a ratio of its own; sequence: GSPO, with --loss_type grpo",
        choices=("token", "sequence"))
    beta: float = option(
        0.0, "weight of the KL term, which holds the policy near its first weights")
    scale_rewards: str = option(
        "group", "std that divides advantages", choices=("group", "batch", "none"))
    baseline: str = option(
        "group", "what a reward is compared with: the mean of all, or of the others",
        choices=("group", "leave_one_out"))
    mask_truncated_completions: bool = option(False, "do not train on completions that were cut")
    vllm_importance_sampling_correction: bool = option(
        True, "weigh tokens by trainer/sampler probability")
    vllm_importance_sampling_clip_max: float = option(3.0, "cap of that weight")

    # the optimizer, speed and memory
    learning_rate: float = option(1e-6, "peak learning rate of AdamW")
    lr_scheduler_type: str = option(
        "constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_rate: float = option(
        0.1, "the cosine ends at this part of the learning rate", low=0, high=0.999)
    warmup_steps: int = option(0, "steps of linear warm-up")
    weight_decay: float = option(0.0, "decoupled weight decay, of all parameters")
    adam_beta1: float = option(0.9, "AdamW", low=0, high=0.999999)
    adam_beta2: float = option(0.999, "AdamW", low=0, high=0.999999)
    adam_epsilon: float = option(1e-8, "AdamW")
    max_grad_norm: float = option(1.0, "the gradient's norm over all parameters is clipped to this")
    micro_batch_tokens: int = option(
        16384, "tokens of one forward and backward; lower it when out of memory")
    optimizer_offload: bool = option(
        False, "master weights and moments in the CPU's memory: slower updates")
    recompute: bool = option(
        False, "keep no activations between forward and backward: a third more work")
    compile: str = option(
        "auto", "fuse layers with torch.compile, 10 to 15 s at first, updates a quarter shorter; auto: GPUs, "
        "from 0.4 billion parameters", choices=("auto", "on", "off"))
    dtype: str = option(
        "auto", "working weights; auto is bfloat16 on a GPU, float32 on a CPU",
        choices=("auto", "bfloat16", "float32"))

    # the run
    max_steps: int = option(-1, "updates; -1 takes num_train_epochs over the data", low=-1)
    num_train_epochs: float = option(
        1.0, "passes over the data when max_steps is not given", high=1e6)
    eval_steps: int = option(50, "evaluate every so many steps, before and after; 0: never", low=0)
    eval_num_generations: int = option(
        1, "completions a prompt at evaluation; from 2 on also gives pass@k")
    eval_temperature: float = option(0.0, "of evaluation; 0 is greedy")
    eval_max_completion_length: int = option(0, "tokens at evaluation; 0: as in training")
    save_steps: int = option(
        50, "a checkpoint every so many steps; the last weights are always written")
    save_total_limit: int = option(2, "checkpoints to keep")
    timeout_minutes: float = option(
        30.0, "give up, naming the rank, when one is so much later than another", high=1e6)
    max_skipped: int = option(
        10, "give up after so many updates in a row whose gradient is not finite")
    save_rollouts: int = option(10, "keep the completions of the last so many steps", low=0)
    log_completions: int = option(
        0, "how many to print a step; TRL's is a switch, ours a number")
    report_to: list[str] = option(
        (), "where metrics go too; needs the package of that name", choices=("tensorboard", "wandb"))
    seed: int = option(0, "of the order of prompts and of every sample", low=-2**31)
    out: str = option("", "run folder (default: runs/<model>-<data>-<hash of the options>)")
    fresh: bool = option(False, "start anew where the run folder holds an earlier run")

    @property
    def max_model_len(self):
        """Tokens of the longest sequence that the engine has to hold."""
        return self.max_prompt_length + max(self.max_completion_length, self.eval_max_completion_length)

    @property
    def prompts_taken(self):
        """How many prompts of an epoch a step uses up, whether or not dynamic sampling needs them all."""
        return self.prompts_per_step * (1 + self.dynamic_sampling_rounds)

    @property
    def evaluation(self):
        """These options where completions are sampled as at evaluation."""
        return dataclasses.replace(
            self,
            num_generations=self.eval_num_generations,
            max_completion_length=self.eval_max_completion_length or self.max_completion_length,
            temperature=self.eval_temperature)

    @property
    def saved_options(self):
        """What config.json in the run folder holds. Not where the folder is: it may be copied."""
        values = dataclasses.asdict(self)
        del values["out"], values["fresh"]
        return values

    @property
    def run_folder(self):
        """--out, or a name that the same command finds again and that no other one has."""
        if self.out:
            return Path(self.out)
        fixed = {name: value for name, value in self.saved_options.items() if name not in FREE}
        digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:8]
        data = "+".join(Path(source).stem for source in self.data)
        return Path(f"runs/{Path(self.model).name}-{data}-{digest}")


# A run continues also with other values of these: they decide what is seen and kept of it, and in how much
# time and memory it runs.
FREE = """
    log_completions report_to timeout_minutes save_steps save_total_limit save_rollouts max_skipped
    reward_timeout reward_workers micro_batch_tokens recompute compile optimizer_offload
    vllm_gpu_memory_utilization vllm_enforce_eager
    """.split()

# Defaults of the built-in model, which the bare command trains: about two minutes on two CPU cores.
TINY = dict(
    prompts_per_step=32, num_generations=16, max_completion_length=4, max_prompt_length=8, max_steps=200,
    learning_rate=1e-3, lr_scheduler_type="linear", max_grad_norm=0.2, eval_steps=25)

REFUSED = dict.fromkeys(  # options that people bring along, and why they are not here
    "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty".split(),
    "rollouts are drawn from the policy itself (top_p 1, no top_k, no penalties): otherwise the sampler's "
    "log-probabilities are of another distribution than the one that is trained")
REFUSED |= {
    "per_device_train_batch_size": "use --prompts_per_step (over all ranks) and --micro_batch_tokens",
    "gradient_accumulation_steps": "use --micro_batch_tokens: micro-batches are cut by length",
    "steps_per_generation": "use --num_minibatches",
    "gradient_checkpointing": "use --recompute",
    "use_vllm": "use --colocate",
    "vllm_mode": "use --colocate",
}


# ---- The command line --------------------------------------------------------------------------------------

def parse(arguments, **choices):
    """The command line → Config. choices: of options whose values are known elsewhere, as loss_type's are.

    Raises ValueError that says what is wrong with an option, or which one was probably meant.
    """
    parser = Parser(
        description="GRPO from scratch, with a vLLM engine in every rank.", allow_abbrev=False,
        usage="%(prog)s [--option value ...]",
        epilog="Other defaults of --model tiny: " + ", ".join(f"{k} {v}" for k, v in TINY.items()))
    for field in dataclasses.fields(Config):
        add_option(parser, field, choices.get(field.name, field.metadata.get("choices")))
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(what_was_meant(unknown))
    if known.model == "tiny":
        parser.set_defaults(**TINY)
    return Config(**vars(parser.parse_args(arguments)))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """argparse would print all of the usage and exit."""
        raise ValueError(f"{message} (--help lists all options)")


def add_option(parser, field, choices):
    """The option of one field of Config."""
    text = field.metadata["help"]
    default = " ".join(field.default) if isinstance(field.default, tuple) else str(field.default)
    if default and "default" not in text:
        text += f" (default: {default})"
    if field.type is bool:
        how = dict(action=argparse.BooleanOptionalAction)
    elif field.type in (str, int, float):
        how = dict(type=field.type, choices=choices)
    else:  # list[str] or list[float]
        how = dict(type=field.type.__args__[0], choices=choices, nargs="+")
    parser.add_argument(f"--{field.name}", default=field.default, help=text, **how)


def what_was_meant(unknown):
    """A sentence about words that are no options."""
    names = [word.removeprefix("--").split("=")[0] for word in unknown]
    for name in names:
        if name in REFUSED:
            return f"--{name}: {REFUSED[name]}"
    for near in difflib.get_close_matches(names[0], vars(Config()), 1):
        return f"{unknown[0]} is no option: did you mean --{near}?"
    return f"{unknown[0]} is no option"


# ---- What would be accepted and go wrong -------------------------------------------------------------------

def check(c):
    """Raises ValueError, naming the option, for values with which no run makes sense."""
    completions = c.prompts_per_step * c.num_generations
    launcher = os.environ.get("WORLD_SIZE")  # torchrun sets it
    find = importlib.util.find_spec
    # A folder of a package's name is found too, but has no origin.
    missing = [name for name in c.report_to if not getattr(find(name), "origin", None)]
    mistakes = [  # (whether it is made, what to say of it)
        (missing, f"--report_to {' '.join(missing)} needs a package: pip install {' '.join(missing)}"),
        (completions > 2**20,
         f"--prompts_per_step times --num_generations is {completions}: use at most {2**20}"),
        (c.max_steps == 0, "--max_steps 0: use 1 or more, or omit it for --num_train_epochs"),
        ("" in c.stop, '--stop "": use a text that completions are to end with, e.g. "</answer>"'),
        (c.num_minibatches > c.prompts_per_step,
         f"--num_minibatches {c.num_minibatches}: use at most --prompts_per_step"),
        (c.eval_num_generations > 1 and c.eval_temperature == 0,
         f"--eval_num_generations {c.eval_num_generations}: greedy completions are all alike: give "
         "--eval_temperature, e.g. 1.0"),
        (0 < c.eval_temperature < 0.01, f"--eval_temperature {c.eval_temperature}: use 0 or at least 0.01"),
        (c.loss_type == "cispo" and c.epsilon_high <= 1,
         f"--epsilon_high {c.epsilon_high} is the cap of cispo's weights: use e.g. 5"),
        (0 < c.delta <= 1 + (c.epsilon_high or c.epsilon),
         f"--delta {c.delta}: use more than 1 + epsilon_high, e.g. 2, or 0 for none"),
        (len({Path(source).stem for source in c.eval_data}) < len(c.eval_data),
         f"--eval_data {' '.join(c.eval_data)}: give each file another name"),
        (c.colocate + c.split + bool(c.replay) > 1,
         "--colocate, --split and --replay exclude each other: use --colocate, the fastest"),
        ((c.colocate or c.split) and not launcher,
         f"{'--split' if c.split else '--colocate'} runs under torchrun: "
         f"torchrun --nproc_per_node={2 if c.split else 1} {' '.join(sys.argv)}"),
        (c.split and launcher == "1",
         "--split needs 2 ranks or more: --nproc_per_node=2, or --colocate on one"),
    ]
    numbers = [field for field in dataclasses.fields(c) if field.type in (int, float)]
    mistakes = [out_of_range(field, getattr(c, field.name)) for field in numbers] + mistakes
    for made, message in mistakes:
        if made:
            raise ValueError(message)


def out_of_range(field, value):
    """(whether a number is too small, too large or NaN, what to say of it)"""
    low = 1 if field.type is int else ABOVE_0
    if field.default == 0:
        low = 0
    low = field.metadata.get("low", low)
    high = field.metadata.get("high", 2**31 if field.type is int else 1e30)
    limit = f"{low} or more"
    if value > high:
        limit = f"at most {high}"
    elif low == ABOVE_0:
        limit = "a number above 0"
    allowed = low <= value <= high  # NaN is not
    return not allowed, f"--{field.name} {value}: use {limit}, e.g. {field.default}"

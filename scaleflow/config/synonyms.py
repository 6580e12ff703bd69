"""Translates words that users know from other tools into scaleflow's words.

The tables are data. If an unknown word is in one of them, the error message says what to type.
"""

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces.features import list_features


def invert(table: Mapping[str, str]) -> dict[str, str]:
    """Returns what each name means, from a table of meanings with their names in one text."""
    meanings = {}
    for meant, names in table.items():
        for name in names.split():
            meanings[name] = meant
    return meanings


#: The last part of a key, in lower case and without `_` and `-` -> what to type, with `{}` for the value.
KEYS = invert(
    {
        "optimizer.learning_rate={}": "lr rate learningrate baselr maxlr initiallr eta stepsize",
        "training.batch_size={}": "batch bs b batchsize minibatch minibatchsize perdevicetrainbatchsize trainbatchsize",
        "training.global_batch_size={}": "globalbatch globalbatchsize totalbatchsize effectivebatchsize",
        "training.epochs={}": "e epoch epochs nepochs numepochs maxepochs nbepochs trainepochs numtrainepochs",
        "training.max_steps={}": "steps maxsteps numsteps trainsteps totalsteps iterations numiterations maxiter",
        "training.max_seconds={}": "seconds maxseconds maxtime timeout timelimit timebudget",
        "training.steps_per_epoch={}": "stepsperepoch limittrainbatches",
        "training.accumulate={}": "accumulate accumulation gradaccum accumulategradbatches gradientaccumulationsteps",
        "training.clip_norm={}": "clip clipnorm gradclip gradientclipval clipgradnorm maxgradnorm globalclipnorm",
        "'training.early_stopping={{patience: {}}}'": "patience earlystop earlystopping earlystoppingpatience",
        "optimizer.warmup_steps={}": "warmup warmupsteps numwarmupsteps",
        "optimizer.schedule={}": "schedule scheduler lrscheduler lrschedulertype lrschedule",
        "optimizer=adamw optimizer.weight_decay={}": "wd weightdecay",
        "optimizer=sgd optimizer.momentum={}": "momentum",
        "objective.label_smoothing={}": "labelsmoothing labelsmoothingfactor",
        "objective.class_weight={}": "classweight classweights",
        "objective.loss={}": "loss lossfn lossfunction criterion",
        "'objective.metrics=[{}]'": "metric metrics",
        "dataset.data_dir={}": "data datadir datapath dataroot file path csv input traindata trainfile datafile",
        "dataset.target={}": "target label labels y targetcolumn labelcolumn labelcol",
        "dataset.weights={}": "sampleweight sampleweights exampleweight exampleweights weightcolumn weightcol",
        "'dataset.columns=[{}]'": "features featurecolumns xcolumns",
        "dataset.limit={}": "limit nrows maxsamples maxexamples maxtrainsamples numsamples",
        "dataset.validation={}": "val validation valsize valsplit valfraction validationsize validationsplit",
        "dataset.test={}": "testsize testsplit testfraction",
        "'dataset.split={{by: group, column: {}}}'": "group groups groupby groupcolumn groupcol",
        "'dataset.split={{by: stratum, column: {}}}'": "stratify stratifyby",
        "'dataset.split={{by: column, column: {}}}'": "splitcolumn splitcol",
        "'dataset.split={{by: time, column: {}}}'": "timecolumn timecol",
        "'dataset.delimiter=\"{}\"'": "sep separator delimiter",
        "model.units={}": "units hidden hiddensize hiddenunits hiddenlayers width layers",
        "model.dropout={}": "dropout dropoutrate",
        "model.init_from={}": "pretrained initcheckpoint weights loadfrom finetunefrom",
        "resume={}": "resume ckpt ckptpath resumefromcheckpoint restore continue",
        "checkpoint.every_steps={}": "savesteps saveeverysteps saveeverynsteps",
        "checkpoint.every_epochs={}": "saveevery saveperiod saveeveryepochs everynepochs",
        "hydra.run.dir={}": "out output outputdir outdir logdir savedir rundir workdir defaultrootdir",
        "seed={}": "randomseed randomstate manualseed seedeverything rngseed",
        "tracking.experiment={}": "experiment experimentname project projectname",
        "tracking.run_name={}": "name runname",
        "tracking.uri={}": "uri mlflow mlflowuri trackinguri mlflowtrackinguri",
        "tracking.register_as={}": "register registeras registeredmodelname",
        "dataset.threads={}": "numworkers dataloadernumworkers loaderworkers numthreads preprocessingnumworkers",
        "'dataset.size={}'": "imagesize imgsize targetsize inputsize",
        "model={}": "model arch architecture modelname network backbone",
        "dataset={}": "dataset",
        "optimizer={}": "optimizer optim opt",
        "hardware={}": "hardware accelerator",
        "strategy={}": "strategy",
        "checkpoint=best": "savebestonly loadbestmodelatend keepbest",
        "strategy=multi_worker cluster.workers={}": "workers nworkers nodes nnodes numnodes worldsize",
        "-m hydra.launcher.n_jobs={}": "jobs njobs parallel",
        "-m hydra/sweeper=optuna5 hydra.sweeper.n_trials={}": "trials ntrials numtrials",
        "precision={}": "precision dtype policy dtypepolicy mixedprecisionpolicy",
        "precision=mixed": "fp16 amp half halfprecision mixedprecision",
        "precision=mixed_bfloat16": "bf16",
        "hardware.xla=true": "xla jit jitcompile",
        "hardware.deterministic=true": "determinism deterministic",
        "hardware=cpu": "cpu usecpu nocuda nogpu",
        "profiler=trace": "profile profiler profiling",
        "debug=fast": "dryrun fastdevrun smoketest",
        "debug=overfit": "overfit overfitbatches",
        "--config-dir {}": "config configfile configdir",
    }
)

#: Keys without an equivalent -> the alternative. A name without a group is a last part, written as above.
ABSENT = {
    "dataset.weights": "weights are read by dataset=table, huggingface, tfrecord and npz",
    "optimizer.decay": "a rate that falls is optimizer.schedule=cosine, and weight decay is optimizer=adamw "
    "optimizer.weight_decay=0.01",
    "decay": "a rate that falls is optimizer.schedule=cosine, and weight decay is optimizer=adamw "
    "optimizer.weight_decay=0.01",
    "verbose": "each epoch has a line, and the worker's log has the rest; hydra.verbose=true shows Hydra's own log",
    "optimizer.over": "a schedule follows the updates, so that a resumed run equals one that was not stopped; set "
    "training.max_steps to what the run reaches in its time",
}

#: A callback of other tools, written like the keys above -> what to type.
CALLBACKS = invert(
    {
        "'training.early_stopping={patience: 5}'": "earlystopping",
        "optimizer.schedule=plateau": "plateau reducelronplateau reducelr lrscheduler learningratescheduler",
        "checkpoint=best": "modelcheckpoint checkpoint",
        "checkpoint=default": "backupandrestore backup",
        "profiler=trace": "tensorboard",
        "'training.callbacks=[{_target_: keras.callbacks.CSVLogger, filename: log.csv}]'": "csvlogger csv",
    }
)

#: Values of a device key that name a kind of device.
DEVICE_KINDS = invert({"hardware=gpu": "cuda gpu true", "hardware=cpu": "cpu false none", "hardware=tpu": "tpu xla"})

#: Keys that set how many devices a run uses.
DEVICES = invert({"devices": "gpu gpus ngpus numgpus device devices numdevices nprocpernode nprocs accelerators"})

#: Other tools' names of an option, written like the keys above -> what to type.
OPTIONS = {
    "precision": invert(
        {
            "precision=mixed_float16": "fp16 16 float16 16mixed half f16 mixedfp16",
            "precision=mixed_bfloat16": "bf16 bfloat16 bf16mixed mixedbf16",
            "precision=mixed": "amp auto mixedprecision 16bit true",
            "precision=float32": "fp32 32 full single 32true float f32 tf32",
        }
    ),
    "strategy": invert(
        {
            "strategy=mirrored": "ddp dp multigpu dataparallel distributed mirror ddpspawn horovod mirroredstrategy",
            "strategy=pipeline": "fsdp deepspeed modelparallel tensorparallel zero zero2 zero3 sharded megatron",
            "strategy=tpu": "tpus tpupod tpuvm xlatpu tpustrategy",
            "strategy=multi_worker": "multinode multimachine multihost multiworkermirrored mwms collective",
            "strategy=parameter_server": "ps async paramserver parameterservers parameterserverstrategy",
            "strategy=one_device": "none single default cpu gpu singledevice onedevice one",
        }
    ),
    "hardware": invert({"hardware=gpu": "cuda gpus nvidia", "hardware=tpu": "tpus", "hardware=auto": "default any"}),
    "model": invert(
        {
            "model=mlp": "dense fc dnn ffn nn ann feedforward perceptron",
            "model=cnn": "conv convnet lenet simplecnn",
            "model=linear": "logistic logisticregression linearregression regression",
            "model=tabular": "xgboost lightgbm catboost boosting tabnet tabm realmlp",
            "model=transformer": "bert distilbert roberta encoder textclassifier",
            "model=gpt": "gpt2 llm lm decoder nanogpt",
            "model=unet": "segmentation deeplab fcn",
        }
    ),
    "optimizer": invert({"optimizer=sgd": "gd momentum nesterov", "optimizer=adamw": "adamwithweightdecay"}),
    "dataset": invert(
        {
            "dataset=table": "parquet tsv pandas dataframe tabular json jsonl feather excel",
            "dataset=image_folder": "image images photos pictures imagefolders imagedirectory",
            "dataset=text_folder": "text texts txt textdirectory",
            "dataset=huggingface": "hf datasets hub",
            "dataset=npz": "numpy npy arrays",
            "dataset=tfrecord": "records tfrecords",
            "dataset=cifar10": "cifar",
            "dataset=imdb_reviews": "imdb",
            "dataset=synthetic": "random dummy fake toy",
        }
    ),
    "tracking": invert({"tracking=none": "false off no disabled", "tracking=mlflow": "true on yes local sqlite"}),
    "profiler": invert({"profiler=trace": "true on yes tensorboard simple xprof"}),
    "debug": invert({"debug=none": "false off no", "debug=eager": "runeagerly", "debug=inline": "true on yes pdb"}),
}

#: Commands of other tools that scaleflow does not have under another name -> what to type.
OTHER_COMMANDS = invert(
    {
        "scaleflow KEY=VALUE ..., without a command": "train fit run start launch",
        "scaleflow -m KEY=VALUE,VALUE ...": "sweep multirun hpo search gridsearch",
        "scaleflow resume=FOLDER": "resume continue restart",
        "mlflow ui": "ui list ls runs log logs show dashboard",
        "mlflow models serve -m models:/NAME@champion --env-manager local": "serve server api",
        "scaleflow --help": "help usage",
        "scaleflow --version": "version",
    }
)

#: Networks of `keras.applications`. The first of each family is suggested for other members of the family.
NETWORKS = (
    *("ResNet50", "ResNet101", "ResNet152", "EfficientNetB0", "MobileNetV2", "DenseNet121", "InceptionV3", "Xception"),
    *("ConvNeXtTiny", "NASNetMobile", "VGG16", "VGG19"),
)

#: The suffix of a file, or of the files in a folder -> the option that reads it.
READERS = invert(
    {
        "table": ".csv .tsv .parquet .feather .arrow .jsonl .json .ndjson .gz",
        "image_folder": ".jpg .jpeg .png .bmp .gif",
        "text_folder": ".txt",
        "npz": ".npz",
        "tfrecord": ".tfrecord .tfrecords",
    }
)

#: Maximum number of a table's columns that a message names.
MAX_NAMED_COLUMNS = 20

#: Maximum number of files of a folder, at each level, whose endings are read.
MAX_LISTED_FILES = 1000

#: Usual names of a table's target column.
TARGETS = ("target", "label", "class", "y", "price", "outcome")


def translate_words(words: list[str], flags: Sequence[str]) -> list[str]:
    """Rewrites words that mean a file, such as `my.csv --target price`, as `dataset=...`, and returns all words of a
    run.

    Raises ConfigError, which says what to type, for a flag that is not among a run's `flags` but means a key, and for a
    table without a target.
    """
    path = words[0] if words and is_readable_path(words[0]) else ""
    rest = words[1:] if path and Path(path).exists() else list(words)
    unknown = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in flags]
    meanings: list[str] = []
    target = ""
    for flag in unknown:
        value = take_flag(rest, flag)
        name = flag.partition("=")[0]
        if name == "--target" and path:
            target = value
            continue
        meant = translate_key(f"flag.{name.lstrip('-')}", value)
        if not meant:
            return words  # Hydra's parser names the flag
        meanings.append(meant)
    if meanings:
        raise ConfigError(f"{' '.join(unknown)}: a run has no such flag; type {' '.join(meanings)}")
    if len(rest) == len(words) or not path:
        return words
    option = READERS[find_ending(Path(path))]
    if option == "table" and not target:
        raise ConfigError(f"{path}: the column to predict is missing; type {translate_path(path)}")
    return [*shlex.split(translate_path(path, target)), *rest]


def is_readable_path(word: str) -> bool:
    """Whether a word looks like a file or folder that a dataset can read."""
    return "=" not in word and find_ending(Path(word)) in READERS


def take_flag(words: list[str], flag: str) -> str:
    """Removes a flag and its value, which may be the next word, from words. Returns the value, or ""."""
    index = words.index(flag)
    del words[index]
    _, is_joined, value = flag.partition("=")
    if is_joined or index == len(words):
        return value
    following = words[index]
    if "=" in following or following.startswith("-"):
        return ""
    return words.pop(index)


def simplify(word: str) -> str:
    """Returns a word in lower case, without hyphens, underscores, dots and spaces."""
    return re.sub(r"[-_ .]", "", word).lower()


def translate_key(key: str, value: str) -> str:
    """Returns the words that mean `KEY=VALUE`; "" if the last part of the key is in no table."""
    leaf = simplify(key.rpartition(".")[2])
    one_device = re.fullmatch(r"(?:cuda|gpu)?:?(\d+)", value)
    if leaf in ("gpu", "device") and one_device and (":" in value or value == "0"):
        return f"'hardware.devices=[{one_device[1]}]'"
    if leaf in DEVICES:
        return DEVICE_KINDS.get(simplify(value)) or translate_devices(value)
    if leaf in ("callback", "callbacks"):
        name = simplify(value.strip("[]").rpartition(".")[2])
        return CALLBACKS.get(name, "'training.callbacks=[{_target_: keras.callbacks.NAME}]'")
    meant = KEYS.get(leaf) or list_key_names().get(leaf, "")
    word = meant.format(value.strip("[]") if "[{}]" in meant else value or "VALUE")
    group, _, option = word.partition("=")
    word = list_option_names(group).get(simplify(option), word)
    return "" if group == key else word


@functools.cache
def list_key_names() -> Mapping[str, str]:
    """Returns the translations of other tools' names for keys of features, as `KEYS` does for the core."""
    names: dict[str, str] = {}
    for feature in list_features().values():
        names |= invert(feature.key_names)
    return names


@functools.cache
def list_option_names(group: str) -> Mapping[str, str]:
    """Returns the translations of other tools' names for the options of a group, including options of features."""
    meanings = dict(OPTIONS.get(group, {}))
    for feature in list_features().values():
        names = {word: names for word, names in feature.option_names.items() if word.startswith(f"{group}=")}
        meanings |= invert(names)
    return meanings


def translate_devices(value: str) -> str:
    """Returns the words for a number of devices, for a list of device indices, or for all devices."""
    if value.startswith("["):
        return f"strategy=mirrored 'hardware.devices={value}'"
    if not value.isdigit():
        return "strategy=mirrored"
    count = int(value)
    if count == 0:
        return "hardware=cpu"
    if count == 1:
        return "strategy=one_device"
    indices = ",".join(str(index) for index in range(count))
    return f"strategy=mirrored 'hardware.devices=[{indices}]'"


def translate_option(group: str, option: str) -> str:
    """Returns the words that mean `GROUP=OPTION`; "" if there is no translation."""
    if group == "dataset":
        words = translate_path(option)
        if words:
            return words
    name = simplify(option)
    if group == "model" and name not in OPTIONS["model"]:
        network = find_network(name)
        if network:
            return f"model=keras_application model.name={network}"
    return list_option_names(group).get(name, "")


def find_network(name: str) -> str:
    """Returns the Keras application with a name, or else the first one of its family; "" if there is none."""
    family = re.match(r"vgg|[a-z]{5}", name)
    if family is None:
        return ""
    networks = [network for network in NETWORKS if network.lower().startswith(family[0])]
    for network in networks:
        if network.lower() == name:
            return network
    return networks[0] if networks else ""


def translate_path(word: str, target: str = "") -> str:
    """Returns the words that read a file or folder as a dataset; "" if no option reads it.

    Without a `target`, the words for a table name a column that is likely the target, otherwise the last column.
    """
    path = Path(word)
    option = READERS.get(find_ending(path), "") if path.exists() else ""
    words = f"dataset={option} {quote_override('dataset.data_dir', word)}"
    if option != "table":
        return words if option else ""
    if target:
        return f"{words} {quote_override('dataset.target', target)}"
    columns = read_column_names(path)
    target = guess_target(columns)
    words = f"{words} {quote_override('dataset.target', target)}"
    others = ", ".join(name for name in columns[:MAX_NAMED_COLUMNS] if name != target)
    return f"{words} (or of {others})" if others else words


def guess_target(columns: Sequence[str]) -> str:
    """Returns the column that is likely the target of a table, otherwise the last column."""
    for name in columns:
        if name.lower() in TARGETS:
            return name
    return columns[-1] if columns else "COLUMN"


def find_ending(path: Path) -> str:
    """Returns the suffix of a file; for a folder, of the first readable file in it, at most three levels deep."""
    if not path.is_dir():
        return path.suffix.lower()
    for pattern in ("*", "*/*", "*/*/*"):
        for file in sorted(path.glob(pattern))[:MAX_LISTED_FILES]:
            ending = file.suffix.lower()
            if ending in READERS:
                return ending
    return ""


def read_column_names(path: Path) -> list[str]:
    """Returns the column names of a table; empty if it cannot be read."""
    import pyarrow.csv
    import pyarrow.dataset

    ending = find_ending(path)
    named = {".jsonl": "json", ".ndjson": "json", ".arrow": "feather"}.get(ending, ending[1:])
    tabs = pyarrow.dataset.CsvFileFormat(pyarrow.csv.ParseOptions(delimiter="\t"))
    try:
        return list(pyarrow.dataset.dataset(path, format=tabs if ending == ".tsv" else named).schema.names)
    except (ValueError, OSError):  # the command that reads the file reports the error
        return []


def close_brackets(word: str) -> str:
    """Returns a word with the missing closing brackets and braces appended; "" if none are missing."""
    missing = ""
    for opening, closing in ("[]", "{}", "()"):
        missing += closing * (word.count(opening) - word.count(closing))
    return shlex.quote(word + missing) if missing else ""

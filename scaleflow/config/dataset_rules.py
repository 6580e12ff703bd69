"""The rules about the data and its splits."""

from collections.abc import Sequence

from scaleflow.interfaces import Plan, Rule

#: The class of `dataset=table` and `dataset=csv`.
TABLE = "scaleflow.dataset.table.Table"

#: scaleflow's datasets whose rows have columns.
WITH_COLUMNS = (
    TABLE,
    "scaleflow.dataset.npz.Npz",
    "scaleflow.dataset.huggingface.HuggingFace",
    "scaleflow.dataset.tfrecord.TFRecord",
)

#: scaleflow's datasets whose rows have paths.
FOLDERS = (
    "scaleflow.dataset.image_folder.ImageFolder",
    "scaleflow.dataset.text_folder.TextFolder",
    "scaleflow.dataset.segmentation_folder.SegmentationFolder",
)


def has_invalid_fraction(plan: Plan) -> bool:
    validation = plan.dataset.validation
    return isinstance(validation, float) and not 0 <= validation < 1


def is_fold(fold: tuple[int, int] | None) -> bool:
    return fold is not None and 0 <= fold[0] < fold[1] and fold[1] > 1


def has_split_without_columns(plan: Plan) -> bool:
    """Whether the split needs a column, and the dataset is one of scaleflow's that has none."""
    path = plan.dataset.target.path
    split = plan.dataset.split
    needs_column = split.by in ("group", "time", "column", "hash") or bool(split.column or split.stratum)
    is_own_class = not path.startswith("scaleflow.")  # the worker checks a user's class
    return needs_column and not is_own_class and path not in (*WITH_COLUMNS, *FOLDERS)


def has_useless_split_key(plan: Plan) -> bool:
    """Whether `dataset.split` has a key that its rule does not use."""
    split = plan.dataset.split
    is_random = split.by in ("auto", "random")
    if is_random and (split.column or split.stratum or split.pattern) is not None:
        return True
    if split.gap is not None and split.by != "time":
        return True
    if split.stratum is not None and split.by != "group":
        return True
    return split.column is not None and split.pattern is not None


def has_split_by_target(plan: Plan) -> bool:
    arguments = plan.dataset.target.arguments
    target = arguments.get("target", arguments.get("targets"))
    targets = target if isinstance(target, list) else [target]
    return plan.dataset.split.column in targets


def is_stopped_by_validation(plan: Plan) -> bool:
    """Whether a metric of the validation split can end the run early."""
    stopping = plan.training.early_stopping
    return stopping is not None and stopping.monitor.startswith("val/")


DATASET_RULES: Sequence[Rule] = (
    Rule(
        "dataset.validation!=null",
        "this is not a fraction of the training split",
        "give a fraction from 0 to less than 1, the name of a split, or null",
        only_if=has_invalid_fraction,
    ),
    Rule(
        "dataset.fold!=null",
        "a fold has the form NUMBER/COUNT",
        "write 2/5 for the second of five",
        only_if=lambda p: not is_fold(p.dataset.held_out_fold),
    ),
    Rule(
        "dataset.fold!=null & model.init_from",
        "the run of these weights may have trained on the rows of the fold",
        "use the weights of a file, or train without model.init_from",
        only_if=lambda p: not (p.model.init_from or "").endswith((".keras", ".h5")),
    ),
    Rule(
        "dataset.split.by & dataset._target_",
        "this dataset has no columns",
        "use dataset.split=random or stratum, or a dataset of a table, arrays, records or files",
        only_if=has_split_without_columns,
    ),
    Rule(
        "dataset.split.by in group|time|column|hash & dataset.split.column=null & dataset.split.pattern=null",
        "no column is named",
        "name a column: 'dataset.split={by: group, column: customer}'; of files also pattern",
        keys=("dataset.split.by", "dataset.split.column"),
        only_if=lambda p: p.dataset.target.path in (*WITH_COLUMNS, *FOLDERS),
    ),
    Rule(
        "dataset.split.by",
        "this kind of split does not use one of the other keys",
        "give column or pattern with stratum, group, time, column or hash, stratum with group, gap with time",
        only_if=has_useless_split_key,
    ),
    Rule(
        "dataset.split.by in group|hash|column & dataset.split.column!=null",
        "the column is the target",
        "name another column, or use dataset.split=stratum, which gives each split its share of the target",
        only_if=has_split_by_target,
    ),
    Rule(
        "dataset.split.pattern!=null & dataset._target_",
        "only files of a folder have paths",
        "name a column with dataset.split.column",
        only_if=lambda p: p.dataset.target.path not in FOLDERS,
    ),
    Rule(
        # The worker checks a user's own dataset class.
        f"dataset.shards>1 & dataset._target_!={TABLE}",
        "only tables that are read while training can be divided by their files",
        "use dataset=table, or leave dataset.shards 1",
        only_if=lambda p: p.dataset.target.path.startswith("scaleflow."),
    ),
    Rule(
        "dataset.shards>1 & dataset.cache in memory|file",
        "every worker would read all rows once, to keep them",
        "use dataset.cache=none, or leave dataset.shards 1",
    ),
    Rule(
        "training.early_stopping.monitor & !dataset.validation & !dataset.fold",
        "there is no validation split",
        "set dataset.validation=0.1, or monitor train/loss",
        keys=("training.early_stopping.monitor", "dataset.validation"),
        only_if=is_stopped_by_validation,
    ),
)

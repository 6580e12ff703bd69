"""Checks the files of a dataset in the launcher, by the rules of its source, before TensorFlow is imported.

It only lists files and reads the header of one of them. The source, in the worker, checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scaleflow.dataset.npz import check_names
from scaleflow.dataset.reading.corpus import SUFFIXES as CORPUS_SUFFIXES
from scaleflow.dataset.reading.division import check_pattern, find_keys, parse_gap
from scaleflow.dataset.reading.files import RECORD_SUFFIXES, class_names, find_data_dir, find_files, find_split_folders
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.tables.files import find_tables
from scaleflow.dataset.tables.kinds import KEYS, choose_columns, parse_column_kinds
from scaleflow.files.object_store import is_store_address
from scaleflow.files.table_formats import CsvForm
from scaleflow.interfaces import Split, Target
from scaleflow.interfaces.options import Words, check_option, to_list

#: A division that needs no columns.
NO_KEYS = Split()

#: The arguments of a source.
Arguments = Mapping[str, Any]


def check_source_files(target: Target, split: Split = NO_KEYS) -> None:
    """Raises ConfigError if the files of one of scaleflow's own sources on this machine are missing or do not fit.

    Other sources, and files in object stores, are not checked.
    """
    parse_gap(split.gap)
    check_pattern(split.pattern)
    check = CHECKS.get(target.path)
    data_dir = target.arguments.get("data_dir")
    if check is not None and data_dir is not None and not is_store_address(data_dir):
        check({**target.arguments, "split": split})


def check_table(arguments: Arguments) -> None:
    data_dir = arguments["data_dir"]
    header = arguments.get("header")
    check_option(header, Words | None, "dataset.header")
    form = CsvForm(arguments.get("delimiter"), tuple(header or ()), arguments.get("encoding", CsvForm.encoding))
    files = find_tables(data_dir, form, LearnedCache(arguments.get("cache_dir"), data_dir))
    kinds = {kind: arguments.get(key.removeprefix("dataset.")) for kind, key in KEYS.items()}
    names = choose_columns(
        files.read_names(),
        arguments.get("target"),
        arguments.get("columns"),
        drop=arguments.get("drop"),
        kinds=kinds,
        roles=find_keys(arguments["split"], arguments.get("weights")),
    )
    parse_column_kinds(names, kinds)


def check_class_folders(arguments: Arguments) -> None:
    base = find_data_dir(arguments["data_dir"])
    classes = arguments.get("classes")
    check_option(classes, Words | None, "dataset.classes")
    class_names(find_split_folders(base).get("train", base), classes or ())


def check_arrays(arguments: Arguments) -> None:
    names = [
        *to_list(arguments.get("inputs", "x") or []),
        *to_list(arguments.get("targets", "y") or []),
        *to_list(arguments.get("weights") or []),
        *find_keys(arguments["split"]).values(),
    ]
    check_names(arguments["data_dir"], names)


#: The sources that are checked.
CHECKS: Mapping[str, Callable[[Arguments], object]] = {
    "scaleflow.dataset.table.Table": check_table,
    "scaleflow.dataset.image_folder.ImageFolder": check_class_folders,
    "scaleflow.dataset.text_folder.TextFolder": check_class_folders,
    "scaleflow.dataset.segmentation_folder.SegmentationFolder": lambda arguments: find_data_dir(arguments["data_dir"]),
    "scaleflow.dataset.npz.Npz": check_arrays,
    "scaleflow.dataset.tfrecord.TFRecord": lambda arguments: find_files(arguments["data_dir"], RECORD_SUFFIXES),
    "scaleflow.dataset.tokens.Tokens": lambda arguments: find_files(arguments["data_dir"], CORPUS_SUFFIXES),
    "scaleflow.dataset.huggingface.HuggingFace": lambda arguments: find_data_dir(arguments["data_dir"]),
}

"""Model factories, initial weights and export. Factories get the dataset's description, in the strategy's scope."""

from scaleflow.compat.keras import keep_names
from scaleflow.model.export import TOLERANCE, RawInputs, digest_weights, keras_file_fault, write_model
from scaleflow.model.fine_tuning import (
    find_decayed,
    find_freeze_warning,
    find_layers,
    find_rate_factors,
    fine_tune,
    list_freeze_phases,
    loads_weights,
    merge_lora,
)
from scaleflow.model.initial import initialize_from, read_weights
from scaleflow.model.keras_file import read_compile_config
from scaleflow.model.keras_hub import check_preset_words
from scaleflow.model.keras_ops import (
    correct_keras_add,
    describe_large_table,
    find_table_ids,
    list_tables,
    read_rows_in_take,
)
from scaleflow.model.layers import entry, head, hidden, label_leaves, make_inputs
from scaleflow.model.make import (
    calibrate_outputs,
    check_positive,
    check_tracked,
    explain_load_error,
    find_batch_norm_warnings,
    find_compile_config,
    find_graph,
    find_load_fault,
    find_low_precision_note,
    find_moving_average_warning,
    keras_file_doubt,
    make_model,
)
from scaleflow.model.tabular import expose_members
from scaleflow.model.weight_mapping import SavedWeights

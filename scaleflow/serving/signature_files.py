"""Names of files in an exported model. This module imports nothing."""

#: The description of the inputs and outputs of a model that answers in its own terms (`plain_model.py`).
PLAIN_SIGNATURE = "plain_signature.json"

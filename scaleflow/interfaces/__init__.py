"""The interfaces of the package. Config groups may import only this module and `errors`.

Import names from here, not from the modules below:

- `command_names`: how the user types a command, for messages (`name_command`).
- `config`: the typed sections of the config, `Plan`, which holds all of them, and `Rule`.
- `data`: datasets: `Source`, `Inputs`, `Outputs`, `Arrays`, `Stream`, `Preprocessing`.
- `learned_state`: what a run learned from its data: `LearnedState`, `EarlierState`; the differences: `LearnedChanges`.
- `directions`: which values of a metric are better (`find_direction`).
- `training`: the types that parts of the worker exchange: batches and feeds, the training step, snapshots, traces.
- `tracking`: the store that a run is recorded in (`Tracker`).

The modules import only scaleflow's errors. They import TensorFlow, Keras and numpy only for type checkers, so that the
command starts fast.
"""

from scaleflow.interfaces.command_names import *
from scaleflow.interfaces.config import *
from scaleflow.interfaces.data import *
from scaleflow.interfaces.directions import Mode as Mode
from scaleflow.interfaces.directions import find_direction as find_direction
from scaleflow.interfaces.directions import find_directions as find_directions
from scaleflow.interfaces.directions import is_smaller_better as is_smaller_better
from scaleflow.interfaces.events import Status as Status
from scaleflow.interfaces.learned_state import *
from scaleflow.interfaces.tracking import *
from scaleflow.interfaces.training import *

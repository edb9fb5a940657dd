"""Running the model: prompts, steps, and how a step is launched. No other package calls the model.

Read ``executor.py`` first: it forwards prompts (``prompts.py``: once for many rows, or in parts) and steps
(``step_inputs.py`` makes their arguments). A step is launched

* kernel by kernel, by the model's own call;
* by a compiled forward, on a cache of fixed length;
* as a recorded CUDA graph (``graphs.py``), with ``use_cuda_graph``.

``hfgen.optimize`` (``optimization/``) changes what is launched. ``ahead.py`` launches the next step before the
host reads whether the call is over.
"""

from .executor import Executor as Executor
from .executor import call as call
from .executor import last_logits as last_logits
from .executor import next_token as next_token
from .executor import prefill as prefill
from .executor import verify as verify
from .padding import MayJoin as MayJoin
from .step_inputs import resized as resized

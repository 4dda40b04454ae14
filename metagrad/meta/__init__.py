"""Meta-learning algorithms: MAML."""

from metagrad.meta.maml import MAML
from metagrad.meta.result import Adapted, MAMLOutput

__all__ = ["MAML", "Adapted", "MAMLOutput"]

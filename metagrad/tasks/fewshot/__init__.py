"""Few-shot classification: tasks of a few classes, each seen a few times."""

from metagrad.tasks.fewshot.few_shot import FewShot
from metagrad.tasks.fewshot.image_folders import ImageFolders

__all__ = ["FewShot", "ImageFolders"]

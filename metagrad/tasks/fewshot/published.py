"""Which classes are for training, validation and test, as papers have split them."""

from __future__ import annotations

_MINI_IMAGENET = {
    "train": (
        "n01532829 n01558993 n01704323 n01749939 n01770081 n01843383 n01910747 n02074367 n02089867 n02091831 "
        "n02101006 n02105505 n02108089 n02108551 n02108915 n02111277 n02113712 n02120079 n02165456 n02457408 "
        "n02606052 n02687172 n02747177 n02795169 n02823428 n02966193 n03017168 n03047690 n03062245 n03207743 "
        "n03220513 n03337140 n03347037 n03400231 n03476684 n03527444 n03676483 n03838899 n03854065 n03888605 "
        "n03908618 n03924679 n03998194 n04067472 n04243546 n04251144 n04258138 n04275548 n04296562 n04389033 "
        "n04435653 n04443257 n04509417 n04515003 n04596742 n04604644 n04612504 n06794110 n07584110 n07697537 "
        "n07747607 n09246464 n13054560 n13133613"
    ),
    "validation": (
        "n01855672 n02091244 n02114548 n02138441 n02174001 n02950826 n02971356 n02981792 n03075370 n03417042 "
        "n03535780 n03584254 n03770439 n03773504 n03980874 n09256479"
    ),
    "test": (
        "n01930112 n01981276 n02099601 n02110063 n02110341 n02116738 n02129165 n02219486 n02443484 n02871525 "
        "n03127925 n03146219 n03272010 n03544143 n03775546 n04146614 n04149813 n04418357 n04522168 n07613480"
    ),
}

_CIFAR_FS = {
    "train": (
        "apple aquarium_fish bear bee bottle bowl boy bridge bus can castle caterpillar chair clock cloud cockroach "
        "couch cup dinosaur dolphin elephant forest girl hamster house kangaroo keyboard lawn_mower lion lizard "
        "lobster mountain mouse mushroom oak_tree orange orchid palm_tree pear pine_tree plate porcupine possum "
        "rabbit raccoon ray road seal shrew skunk skyscraper snake spider squirrel streetcar sunflower tank tiger "
        "train trout tulip turtle willow_tree wolf"
    ),
    "validation": (
        "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree motorcycle otter sea shark "
        "television tractor"
    ),
    "test": (
        "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose snail sweet_pepper table "
        "telephone wardrobe whale woman worm"
    ),
}

PUBLISHED: dict[str, dict[str, list[str]]] = {
    name: {split: classes.split() for split, classes in splits.items()}
    for name, splits in (("mini-ImageNet", _MINI_IMAGENET), ("CIFAR-FS", _CIFAR_FS))
}
"""Class names by the name of the data set and the split: 64, 16 and 20 classes each.

mini-ImageNet by Ravi and Larochelle, Optimization as a Model for Few-Shot Learning, 2017; CIFAR-FS by Bertinetto,
Henriques, Torr and Vedaldi, Meta-Learning with Differentiable Closed-Form Solvers, 2019.
"""

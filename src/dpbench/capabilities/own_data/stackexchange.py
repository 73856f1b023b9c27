"""`stackexchange_tags`: the tags of the questions that people ask on a Stack Exchange site."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from dpbench.capabilities.own_data.files import FilePath, HeldOutShare, held_out_users
from dpbench.capabilities.own_data.posts import questions_of, words_of_others
from dpbench.capabilities.own_data.texts import bags_of_words
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.sources import UserData, by_users
from dpbench.data.held_out import Split
from dpbench.data.sources import find_file
from dpbench.data.texts import by_frequency, read_vocabulary

Size = Annotated[int, Field(ge=1, le=1_000_000), "a whole number from 1 to 1000000"]
SizeOrAll = Annotated[int, Field(ge=0, le=1_000_000), "a whole number from 0 to 1000000"]


@by_users("stackexchange_tags")
def load_tags(
    root: Path,
    download: bool,
    site: str = "beer",
    path: FilePath = None,
    num_features: Size = 10_000,
    num_tags: SizeOrAll = 500,
    vocabulary: str = "others",
    held_out: HeldOutShare = 0.2,
    held_out_by: Split = "hash",
) -> UserData:
    """Tag prediction, the task SO-LR of "Adaptive Federated Optimization" on another site of Stack Exchange.

    An example is a tagged question: the share of each word among all words of title and body, and its tags. Test
    questions are those of held-out users. Of beer.stackexchange (2014-2017) 325 of the 782 people with posts asked 659
    questions with 155 tags: a set to try things on; about 260 users train.

    Args:
        root: Folder of the data sets; the file is `stackexchange/SITE/Posts.xml` in it.
        download: Not used: the file has to be there.
        site: Name of the site, as its folder is called.
        path: Another `Posts.xml`, see `sources.find_file`.
        num_features: Words that are features; where there are fewer, features stay zero.
        num_tags: Targets, in the order of the alphabet; the published model has 500. A site with fewer tags leaves
            targets zero, of one with more the most frequent are taken. 0: as many as the site has tags. (A site
            publishes its tags and how often each is used.)
        vocabulary: "others": the most frequent words of authors who never asked a tagged question, which say nothing
            of the users (9,712 on beer.stackexchange, 96 % of the users' words). Else the path of a file of words.
        held_out: HeldOutShare of the users that test questions are of.
        held_out_by: How these are chosen, see `UserDataModule`.
    """
    file = find_file(root, path) if path else root / f"stackexchange/{site}/Posts.xml"
    posts, tags = questions_of(file)
    users = [str(post.user) for post in posts]
    if vocabulary == "others":
        vocabulary_words = by_frequency(words_of_others(file, set(users)))[:num_features]
    else:
        vocabulary_words = read_vocabulary(find_file(root, vocabulary), num_features)
    height = num_tags or len(tags)
    known_tags = sorted(by_frequency(tags)[:height])
    texts = [post.words for post in posts]
    examples = bags_of_words(texts, [post.tags for post in posts], vocabulary_words, known_tags, num_features, height)
    train, test_users, test = held_out_users(UserDataset(examples, users), held_out, held_out_by, file)
    return UserData(
        train=train,
        test=test,
        model_options={"num_features": num_features, "num_tags": height},
        test_users=test_users,
        noise_batch=partial(tag_noise, num_features=num_features, num_tags=height),
        attribution=(
            f"questions of {path or f'{site}.stackexchange.com'} (Stack Exchange data dump) by their authors, "
            "licensed CC BY-SA (3.0 for posts until May 2018, 4.0 for later ones)."
        ),
    )


def tag_noise(
    size: int,
    generator: torch.Generator,
    num_features: int,
    num_tags: int,
    words: int = 40,
) -> tuple[Tensor, Tensor]:
    """Draw texts of random words, as shares (size, num_features), with two random tags each on average."""
    shares = torch.zeros(size, num_features)
    chosen = torch.randint(num_features, (size, words), generator=generator)
    shares.scatter_add_(1, chosen, torch.full(chosen.shape, 1 / words))
    return shares, (torch.rand(size, num_tags, generator=generator) < 2 / num_tags).float()

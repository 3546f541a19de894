"""How large a synthetic NSD is: from a few hundred kilobytes to a full subject. Numbers only."""

from collections.abc import Mapping
from dataclasses import field

from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.nsd.layout import REPS, RUNS, SUBJECTS


@dataclass(frozen=True)
class Scale:
    """Sizes that the release has too, under its own names."""

    volume: tuple[int, int, int] = (5, 7, 6)
    """X, Y, Z: all different, so that a transposition cannot go unnoticed."""
    trials: int = 24
    """Trials of a session; 750 in the release."""
    planned_sessions: int = 3
    """Sessions that were planned; 40 in the release."""
    sessions: Mapping[int, int] = field(default_factory=lambda: {1: 3, 2: 2})
    """Sessions that each subject did."""
    shared: int = 4
    """Pictures that all subjects saw; 1,000 in the release."""
    picture: int = 9
    """Height and width of the pictures; 425 in the release."""
    region_voxels: int = 27
    """Voxels of nsdgeneral."""

    def __post_init__(self) -> None:
        if self.trials < RUNS or self.trials * self.planned_sessions % REPS:
            raise ConfigError(
                f"trials={self.trials}, planned_sessions={self.planned_sessions}: expected at least {RUNS} trials a "
                f"session, and all trials together divisible by {REPS}, since each picture is shown so often"
            )
        for subject, sessions in self.sessions.items():
            if subject not in SUBJECTS or not 1 <= sessions <= self.planned_sessions:
                raise ConfigError(
                    f"sessions={dict(self.sessions)}: expected subjects 1 to 8 with 1 to {self.planned_sessions} "
                    f"sessions each"
                )
        if not 0 < self.shared < self.images:
            raise ConfigError(f"shared={self.shared}: expected 1 to {self.images - 1} of {self.images} pictures")
        if not 1 <= self.region_voxels <= self.voxels // 3:
            raise ConfigError(
                f"region_voxels={self.region_voxels}: expected 1 to {self.voxels // 3}, a third of the volume"
            )

    @property
    def voxels(self) -> int:
        x, y, z = self.volume
        return x * y * z

    @property
    def images(self) -> int:
        """Pictures of one subject; 10,000 in the release."""
        return self.trials * self.planned_sessions // REPS

    @property
    def stimuli(self) -> int:
        """Pictures of all subjects; 73,000 in the release."""
        return self.shared + len(SUBJECTS) * (self.images - self.shared)


TINY = Scale()
"""372 KB with two subjects: for tests."""
SMALL = Scale((21, 26, 22), 120, 4, {1: 4}, shared=16, picture=64, region_voxels=900)
"""Some 20 MB: for trying things out."""
FULL = Scale((81, 104, 83), 750, 40, {1: 40}, shared=1000, picture=425, region_voxels=15_724)
"""Subject 1 as it is: 42 GB of betas and 40 GB of pictures, less where only the region is written."""

SCALES = {"tiny": TINY, "small": SMALL, "full": FULL}

"""A small MindEye: learn to tell from a brain's response which picture was seen, and test it on pictures held out.

python examples/mindeye.py                              # on a synthetic subject, a minute or two on 2 cores
python examples/mindeye.py --root /data/nsd --epochs 30 # on the release, or on MindEye's shards (--backend tar)
torchrun --nproc-per-node 2 examples/mindeye.py …       # on several ranks
python examples/mindeye.py --root … --checkpoint run.pt # the same command continues after a stop

From the release, voxels are first copied by trial (``NSD.prepare``): once, 1 GB per subject, into ``penstock`` in the
root, or into ``--prepared``. As many sessions are used as are there; pictures are read when they are needed.

Voxels and pictures are embedded into one space, in which the two of a pair are drawn together (the contrastive loss of
CLIP). The test asks, for each response to a shared picture, which of all shared pictures it was.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, normalize

from penstock.nsd import NSD, get_dataloaders, synthesize
from penstock.nsd.synthetic import Scale
from penstock.nsd.synthetic.shards import write_shards

SYNTHETIC = Scale((16, 20, 18), 300, 10, {1: 10}, shared=100, picture=32, region_voxels=1200)
COLUMNS = ("voxels", "images", "coco")


class Model(nn.Module):
    """Two encoders into one space."""

    def __init__(self, voxels: int, width: int = 256, grid: int = 8) -> None:
        super().__init__()
        self.grid = grid
        self.brain = nn.Sequential(
            nn.Linear(voxels, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, 64)
        )
        self.picture = nn.Sequential(nn.Linear(3 * grid * grid, width), nn.GELU(), nn.Linear(width, 64))
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, voxels: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = adaptive_avg_pool2d(images, self.grid).flatten(1) - 0.5
        return normalize(self.brain(voxels), dim=1), normalize(self.picture(pixels), dim=1)


def contrastive(brain: torch.Tensor, picture: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    likeness = scale.exp() * brain @ picture.T
    pairs = torch.arange(len(brain), device=brain.device)
    return (cross_entropy(likeness, pairs) + cross_entropy(likeness.T, pairs)) / 2


@torch.no_grad()
def retrieval(model: nn.Module, loader, device: str) -> tuple[float, float]:
    """How often the right picture is the nearest of all, and how often it would be by chance."""
    model.eval()
    found = {}
    for voxels, images, coco in loader:
        brain, picture = model(voxels.float().mean(dim=1).to(device), images.to(device))
        for number, one, other in zip(coco.flatten().tolist(), brain.cpu(), picture.cpu(), strict=True):
            found[number] = one, other
    model.train()
    if dist.is_initialized():  # each rank has a part; a sample that fills up the last batch counts once
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = {number: pair for part in parts for number, pair in part.items()}
    brain, picture = (torch.stack(each) for each in zip(*found.values(), strict=True))
    right = (brain @ picture.T).argmax(dim=1) == torch.arange(len(brain))
    return right.float().mean().item(), 1 / len(brain)


def train(args: argparse.Namespace) -> tuple[float, float]:
    """Retrieval accuracy on the shared pictures after training, and its chance level."""
    main_rank = is_main_rank()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    copies = {"prepared": prepared_folder(args)} if args.backend == "hdf5" else {}
    train_dl, val_dl, num_train, num_val = get_dataloaders(
        args.batch_size, root=args.root, backend=args.backend, subj=args.subject, to_tuple=COLUMNS, seed=args.seed,
        memory=args.memory, image_size=64, val_batch_size=50, **copies,
    )  # fmt: skip
    model = Model(train_dl.dataset.fields["voxels"].shape[-1]).to(device)
    wrapped = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    epoch = step = 0
    if args.checkpoint and Path(args.checkpoint).is_file():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train_dl.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["random"].cpu())
        epoch, step = saved["epoch"], saved["step"]

    def save() -> None:
        if args.checkpoint and main_rank:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            Path(args.checkpoint).parent.mkdir(parents=True, exist_ok=True)
            part = f"{args.checkpoint}.part"  # a stop while it is written leaves the last one whole
            torch.save({**state, "loader": train_dl.state_dict(), "epoch": epoch, "step": step}, part)
            os.replace(part, args.checkpoint)

    if main_rank:
        print(f"{num_train:,} pictures to train on, {num_val:,} to test on, from epoch {epoch}, step {step}")
    found = None
    while epoch < args.epochs:
        for voxels, images, _ in train_dl:  # after a resume: the rest of the epoch
            brain, picture = wrapped(voxels[:, step % 3].float().to(device), images.to(device))
            loss = contrastive(brain, picture, model.scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.stop_after:
                save()
                return float("nan"), float("nan")
        epoch += 1
        save()
        found = retrieval(model, val_dl, device)
        if main_rank:
            print(f"epoch {epoch}: loss {loss.item():.3f}, retrieval {found[0]:.1%}")
    accuracy, chance = found or retrieval(model, val_dl, device)
    if main_rank:
        print(f"retrieval of shared pictures: {accuracy:.1%} right, by chance {chance:.1%}")
    train_dl.close()
    val_dl.close()
    return accuracy, chance


def make_subject(root: Path, scale: Scale = SYNTHETIC) -> None:
    """A synthetic subject whose voxels depend on the pictures, as released and as MindEye's shards."""
    synthesize(root, scale, signal=0.5)
    write_shards(root)


def run(args: argparse.Namespace) -> tuple[float, float]:
    """Train on a root; one rank makes the copies that training from the release needs."""
    if args.backend == "hdf5" and is_main_rank():
        nsd = NSD(args.root, args.subject, prepared=prepared_folder(args))
        print(nsd)
        print(f"voxels by trial are in {nsd.prepare(memory=args.memory)}")
    wait_for_all()
    found = train(args)
    wait_for_all()
    return found


def prepared_folder(args: argparse.Namespace) -> str | None:
    return args.prepared and os.path.join(args.prepared, f"subj{args.subject:02d}")


def is_main_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_main_rank(value: str) -> str:
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="the release, or MindEye's shards; a synthetic subject by default")
    parser.add_argument("--backend", choices=("hdf5", "tar"), default="hdf5")
    parser.add_argument("--subject", type=int, default=1)
    parser.add_argument("--prepared", help="folder for copies of voxels, where the root is read-only")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="file to save to after each epoch, and to continue from")
    parser.add_argument("--stop-after", type=int, help="save and stop after this many steps")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        torch.set_num_threads(1)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.root:
        run(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            args.root = from_main_rank(folder)
            if is_main_rank():
                make_subject(Path(folder))
            for args.backend in ("hdf5", "tar"):
                if is_main_rank():
                    print(f"from {args.backend}:")
                run(args)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

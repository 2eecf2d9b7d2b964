"""Programs written for Accelerate, which the tests migrate and run."""

import textwrap

#: The program of Accelerate's quick tour, with data.
QUICK_TOUR = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)

torch.manual_seed(0)
x = torch.linspace(-1, 1, 64).unsqueeze(1)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training_dataloader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8)
validation_dataloader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=10)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=1000)
loss_function = nn.functional.mse_loss

device = accelerator.device
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)

for batch in training_dataloader:
    optimizer.zero_grad()
    inputs, targets = batch
    outputs = model(inputs)
    loss = loss_function(outputs, targets)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    accelerator.print(loss.item())

validation_dataloader = accelerator.prepare(validation_dataloader)
for inputs, targets in validation_dataloader:
    predictions = model(inputs)
    # Gather all predictions and targets
    all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
    accelerator.print(len(all_predictions), loss_function(all_predictions, all_targets).item())
"""

#: The first steps of the reference of core training, with data; its loader isn't prepared.
CORE_TRAINING = """
from accelerate import Accelerator
import torch
import torch.nn as nn

torch.manual_seed(0)
criterion = nn.CrossEntropyLoss()
dataloader = [{"input": torch.randn(4, 784), "labels": torch.arange(4)} for _ in range(8)]

# Initialize with mixed precision
accelerator = Accelerator(
    mixed_precision="bf16",
    gradient_accumulation_steps=4,
    cpu=True,
)

# Create model and optimizer
model = nn.Linear(784, 10)
optimizer = torch.optim.Adam(model.parameters())

# Prepare for distributed training
model, optimizer = accelerator.prepare(model, optimizer)

# Training loop with gradient accumulation
for batch in dataloader:
    with accelerator.accumulate(model):
        outputs = model(batch['input'])
        loss = criterion(outputs, batch['labels'])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(loss.item())
"""

#: The same, with a loader that is prepared too, as the functions need it.
CORE_TRAINING_PREPARED = (
    CORE_TRAINING.replace("dataloader = [{", "rows = [{")
    .replace("# Create", "dataloader = torch.utils.data.DataLoader(rows, batch_size=None)\n# Create")
    .replace("model, optimizer = ", "model, optimizer, dataloader = ")
    .replace("prepare(model, optimizer)", "prepare(model, optimizer, dataloader)")
)

#: Windows made by hand, functions that take the Accelerator, a parser: as Accelerate's first example.
BY_HAND = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed


def get_dataloaders(accelerator: Accelerator, batch_size: int = 16):
    with accelerator.main_process_first():
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
    data = TensorDataset(x, 3 * x + 1)
    return DataLoader(data, batch_size=batch_size), DataLoader(data, batch_size=7)


def evaluate(accelerator, model, eval_dataloader):
    model.eval()
    rows = 0
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(batch[0])
        predictions, references = accelerator.gather_for_metrics((outputs, batch[1]))
        rows += len(predictions)
    return rows


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    if accelerator.distributed_type == DistributedType.XLA:
        raise SystemExit
    gradient_accumulation_steps = 2
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, 8)
    model = nn.Linear(1, 1)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.1)
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=100)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(3):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            accelerator.print(loss.item())
        accelerator.print(evaluate(accelerator, model, eval_dataloader=eval_dataloader))
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--cpu", action="store_true", default=True)
    args = parser.parse_args([])
    training_function({"seed": 1}, args)


main()
"""

#: Windows, clipping, a schedule, checkpoints and a second run that resumes.
WINDOWS = """
import tempfile
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed


def train(folder, epochs, resume_from=None):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    set_seed(3)
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, x * x), batch_size=4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=1000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    epochs_done = EpochCounter()
    accelerator.register_for_checkpointing(epochs_done)
    if resume_from is not None:
        accelerator.load_state(resume_from)
    while epochs_done.value < epochs:
        for step, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.print(step, loss.item(), scheduler.get_last_lr()[0])
        epochs_done.value += 1
        accelerator.save_state(f"{folder}/{epochs_done.value}")


class EpochCounter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    folder = FOLDER or tempfile.mkdtemp()
    train(folder, 2)
    train(folder, 4, resume_from=f"{folder}/2")


FOLDER = None
main()
"""


#: A loop in a function of its own, which its caller prepares for, as most examples have it.
IN_A_FUNCTION = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator


def train_one_epoch(model, loader, optimizer, accelerator, epoch):
    total = 0.0
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step(); optimizer.zero_grad()
        accelerator.print(loss.item())
        total += loss.item()
    return total


def evaluate(model, loader, accelerator):
    for inputs, targets in loader:
        found, true = accelerator.gather_for_metrics((model(inputs), targets))
        accelerator.print(len(found), nn.functional.mse_loss(found, true).item())


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8)
    test_loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=10)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    for epoch in range(2):
        total = train_one_epoch(model, train_loader, optimizer, accelerator, epoch)
        accelerator.print(epoch, total)
        evaluate(model, test_loader, accelerator)
        accelerator.log({"total": total})


main()
"""


def framed(body: str, *, head: str = "", constructor: str = "Accelerator()") -> str:
    """Return a training program around the body of the loop over its loader."""
    return (
        "import torch\n"
        "from accelerate import Accelerator\n"
        f"{head}"
        f"accelerator = {constructor}\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)\n"
        "for batch in loader:\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
    )

"""Accelerate: accelerate launch --cpu --num_processes 2 examples/coming_from/their_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from shared import Net, accuracy, digits
from torch.utils.data import DataLoader

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
set_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(digits("train"), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(6):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.print(f"accuracy {accuracy(accelerator.unwrap_model(model)):.4f}")
accelerator.end_training()

"""Fit a classifier to the means of three kinds of flowers, and write it as TorchScript: make_model.py PATH."""

import sys

import torch

# sepal length and width, petal length and width, in centimetres: setosa, versicolor, virginica
MEANS = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])


class Classifier(torch.nn.Module):
    """The nearer a flower is to a kind's means, the more probable is that kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        with torch.no_grad():
            self.linear.weight.copy_(2 * MEANS)
            self.linear.bias.copy_(-(MEANS * MEANS).sum(dim=1))

    def forward(self, measures: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"probabilities": torch.softmax(self.linear(measures), dim=1)}


torch.jit.script(Classifier().eval()).save(sys.argv[1])

"""Track how far a group of micro-batches has come, and which tasklets may run next.

The one place that knows what depends on what. Orders choose among what is allowed here, and the
engine asks again before it runs anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet, TokenWindow
from windrow_sidecar.qos.view import Phase


@dataclass(slots=True)
class _Reached:
    """Progress of one micro-batch. Tokens count from the left, but for `back`."""

    up: list[int]  # [layer]: tokens that have passed it forward
    windows: list[list[TokenWindow]]  # [layer]: those that have run up and not yet back
    back: list[int]  # [layer]: tokens from here to the right have run back
    loss: int = 0  # tokens whose loss is known


class GroupProgress:
    """Progress of each micro-batch of one group through the layers.

    Args:
        group: micro-batches that are on their way together; their gradients count as one.
        depth: layers of the model.
    """

    def __init__(self, group: Sequence[MicroBatch], depth: int) -> None:
        self.group, self.depth = tuple(group), depth
        self._of = {
            micro: _Reached([0] * depth, [[] for _ in range(depth)], [micro.width] * depth)
            for micro in group
        }

    @property
    def done(self) -> bool:
        """True where every micro-batch is through."""
        return all(self._is_done(micro) for micro in self.group)

    @property
    def untouched(self) -> bool:
        """True where nothing has run."""
        return all(self._of[micro].up[0] == 0 for micro in self.group)

    def lowest_to_run(self, micro: MicroBatch) -> tuple[int, int, int] | None:
        """The lowest layer that may run forward, and from which token to which; None: none may."""
        limit = micro.width
        for layer, done in enumerate(self._of[micro].up):
            if done < limit:
                return layer, done, limit
            limit = done
        return None

    def highest_window(self, micro: MicroBatch) -> tuple[int, TokenWindow] | None:
        """The highest layer with a window that has yet to run back, and the last one of those."""
        windows = self._of[micro].windows
        for layer in range(self.depth - 1, -1, -1):
            if windows[layer]:
                return layer, windows[layer][-1]
        return None

    def up(self, micro: MicroBatch, layer: int) -> int:
        """Tokens that have passed a layer forward."""
        return self._of[micro].up[layer]

    def above(self, micro: MicroBatch, layer: int) -> int:
        """Tokens whose input to a layer is there: the next forward window ends there at most."""
        return self._of[micro].up[layer - 1] if layer else micro.width

    def loss(self, micro: MicroBatch) -> int:
        """Tokens whose loss is known."""
        return self._of[micro].loss

    def passed(self, micro: MicroBatch) -> int:
        """Return how many tokens times layers it has behind it, up and down."""
        reached = self._of[micro]
        return sum(reached.up) + sum(micro.width - left for left in reached.back)

    def advance(self, tasklet: Tasklet) -> None:
        """Note that a tasklet has run.

        Raises:
            ValueError: it might not have.
        """
        for layer in tasklet.layers:
            self.check(tasklet, layer)
            self.note(tasklet, layer)

    def check(self, tasklet: Tasklet, layer: int | None = None) -> None:
        """Make sure that a layer of a tasklet may run; None: its first one.

        Raises:
            ValueError: it may not.
        """
        if why := self._blocked(tasklet, tasklet.layers[0] if layer is None else layer):
            raise ValueError(f"{tasklet} may not run: {why}")

    def note(self, tasklet: Tasklet, layer: int) -> None:
        """Note that a layer of a tasklet has run which `check` has let pass."""
        micro = tasklet.micro
        assert micro is not None
        reached = self._of[micro]
        if tasklet.phase is Phase.FORWARD:
            reached.up[layer] = tasklet.window.end
            if not micro.evaluation:
                reached.windows[layer].append(tasklet.window)
        elif tasklet.phase is Phase.LOSS:
            reached.loss = tasklet.window.end
        else:
            reached.windows[layer].pop()
            reached.back[layer] = tasklet.window.begin

    def note_all(self, tasklet: Tasklet) -> None:
        """Note that all layers of a tasklet will have run, in a plan."""
        for layer in tasklet.layers:
            self.note(tasklet, layer)

    def layers_behind(self, tasklet: Tasklet) -> int:
        """Return how many layers follow it for certain, by its phase and window.

        Where one micro-batch is on its way and all of its tokens pass together, no order has a
        choice; 0 elsewhere.
        """
        micro = tasklet.micro
        if micro is None or len(self.group) > 1 or tasklet.is_window:
            return 0
        reached = self._of[micro]
        if tasklet.phase is Phase.FORWARD:
            return sum(not tokens for tokens in reached.up[tasklet.layer_end :])
        if tasklet.phase is Phase.BACKWARD:
            whole = 0
            while whole < tasklet.layer:
                windows = reached.windows[tasklet.layer - whole - 1]
                if len(windows) != 1 or windows[0] != tasklet.window:
                    break
                whole += 1
            return whole
        return 0

    def copy(self) -> GroupProgress:
        """Return one that goes its own way from here."""
        twin = GroupProgress((), self.depth)
        twin.group = self.group
        twin._of = {
            m: _Reached(list(r.up), [list(w) for w in r.windows], list(r.back), r.loss)
            for m, r in self._of.items()
        }
        return twin

    def allowed(self, cuts: Sequence[int]) -> Iterator[Tasklet]:
        """Yield every tasklet of one layer that may run now; forward and loss in `cuts` tokens."""
        for micro, reached in self._of.items():
            spans = [
                (Phase.FORWARD, layer, reached.up[layer], self.above(micro, layer))
                for layer in range(self.depth)
            ]
            spans.append((Phase.LOSS, self.depth, reached.loss, reached.up[-1]))
            for phase, layer, begin, limit in spans:
                for end in sorted({min(begin + cut, limit) for cut in cuts}):
                    if end > begin:
                        yield tasklet_of(phase, micro, layer, TokenWindow(begin, end))
            for layer, windows in enumerate(reached.windows):
                if windows:
                    tasklet = tasklet_of(Phase.BACKWARD, micro, layer, windows[-1])
                    if not self._blocked(tasklet, layer):
                        yield tasklet

    def _blocked(self, part: Tasklet, layer: int) -> str:
        reached = self._of.get(part.micro) if part.micro else None
        if reached is None or part.micro is None:
            return "it belongs to another group"
        return self._RULES[part.phase](self, part, layer, part.micro, reached)

    def _forward(self, part: Tasklet, layer: int, micro: MicroBatch, reached: _Reached) -> str:
        if reached.up[layer] != part.window.begin:
            return "tokens to the left have to pass the layer before"
        if self.above(micro, layer) < part.window.end:
            return "the layer below has not run on these tokens"
        return ""

    def _loss(self, part: Tasklet, layer: int, micro: MicroBatch, reached: _Reached) -> str:
        del layer, micro
        if reached.loss != part.window.begin:
            return "the loss is taken from left to right"
        return "" if reached.up[-1] >= part.window.end else "the last layer has not run on them"

    def _backward(self, part: Tasklet, layer: int, micro: MicroBatch, reached: _Reached) -> str:
        if micro.evaluation:
            return "an evaluation goes up only"
        windows = reached.windows[layer]
        if not windows or windows[-1] != part.window:
            return "a layer runs back by the windows in which it ran up"
        if part.window.end != reached.back[layer]:
            return "tokens to the right have to run back before"
        top = layer + 1 == self.depth
        ready = (
            reached.loss >= part.window.end if top else reached.back[layer + 1] <= part.window.begin
        )
        return "" if ready else "the gradient from above is not there"

    _RULES = {  # noqa: RUF012 - a table of methods
        Phase.FORWARD: _forward,
        Phase.LOSS: _loss,
        Phase.BACKWARD: _backward,
    }

    def _is_done(self, micro: MicroBatch) -> bool:
        reached = self._of[micro]
        return (reached.loss == micro.width) if micro.evaluation else reached.back[0] == 0


def tasklet_of(phase: Phase, micro: MicroBatch, layer: int, window: TokenWindow) -> Tasklet:
    """Return the tasklet of one layer; of the loss where `layer` is the number of layers."""
    end = layer if phase is Phase.LOSS else layer + 1
    return Tasklet(micro.step, phase, layer, end, window, micro)

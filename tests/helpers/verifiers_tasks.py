"""A taskset of the package verifiers from version 0.4 on, by its documented classes, for `make environments`."""

import verifiers.v1 as vf


class SumState(vf.State):
    calls: int = 0


class Sums(vf.Toolset[vf.ToolsetConfig, SumState]):
    """Tools of a task, or of all tasks, whose process then stays."""

    async def setup(self):
        self.n = self.calls = 0

    async def setup_task(self, task):
        if task.n == 11:
            raise OSError("no index")
        self.n = task.n

    @vf.tool
    def add(self, a: int, b: int = 1) -> str:
        """Add two numbers, and the task's."""
        if a > 100:
            raise ValueError("a is too large")
        return str(a + b + self.n)

    @vf.tool
    def count(self) -> str:
        """Calls of this conversation, and of the process."""
        self.calls += 1
        self.state.calls += 1
        return f"{self.state.calls} of {self.calls}"


class SumData(vf.TaskData):
    n: int
    answer: str


class SumConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    kind: str = "single"


class SumTask(vf.Task[SumData, SumState, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Sums(config.tools)] if config.kind == "tools" else []

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return "stop" in trace.last_reply

    @vf.intercept
    async def polite(self, response: vf.Response):
        if self.config.kind != "rewrite":
            return None
        return response.model_copy(update={"message": vf.AssistantMessage(content="Something else.")})

    @vf.metric
    async def calls(self, trace) -> float:
        return float(trace.state.calls)

    @vf.reward
    async def right(self, task, trace) -> float:
        if self.config.kind == "broken":
            raise KeyError("missing")
        return float(task.answer in trace.last_reply)

    @vf.reward(weight=0.125)
    async def messages(self, trace) -> float:
        return float(len(trace.messages))


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    image: str | None = None
    shared: bool = False
    asks: bool = True
    system: str = "Be brief."


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            prompt = f"What is {n} + {n}?" if self.config.asks else None
            fields = {"prompt": prompt, "n": n, "answer": str(2 * n), "image": self.config.image}
            yield SumTask(SumData(system_prompt=self.config.system, **fields), self.config.task)
            n += 1

    @classmethod
    def toolsets(cls, config):
        return [Sums(config.task.tools)] if config.shared else []


class HintsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    hints: int = 0


class HintsEnv(vf.Env[HintsConfig]):
    """A user who opens the conversation, if the task does not, and says that a guess is wrong."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn(None if task.data.prompt else f"Twice {task.data.n}?")
            for number in range(1, self.config.hints + 1):
                if said.terminated or said.last_reply == task.data.answer:
                    break
                said = await talk.turn(f"Not {said.last_reply}. That was guess {number}.")


__all__ = ["HintsEnv", "SumsTaskset"]

if __name__ == "__main__":
    Sums.run()

"""One text that a drafter drafts for, told by hand."""

import numpy as np


class OneText:
    """A session and its drafter, which is asked for it alone; what else it has is the session's."""

    def __init__(self, drafter, prompt_ids, target):
        self.drafter = drafter
        self.session = drafter.start(np.array(prompt_ids, np.int32), target)

    def propose(self, budget):
        return self.drafter.propose([self.session], [budget])[0]

    def commit(self, token_ids, feedback):
        self.drafter.commit([self.session], [token_ids], [feedback])

    def __getattr__(self, name):
        return getattr(self.session, name)

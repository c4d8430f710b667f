"""The `judge` reward: a language model behind an OpenAI-compatible endpoint reads responses and scores them.

    reward:
      components:
        - use: judge
          args: {url: "http://127.0.0.1:8000", profile: deepseek_grm, votes: 3}

`scorer.py` puts it together: `settings.py` (what a run file may say, and whether its lengths come out), `prompt.py`
(templates, fences and lengths), `votes.py`, `parse.py` (answers to scores), `guard.py`
(flags and canaries), `user.py` (functions of the user's own).
"""

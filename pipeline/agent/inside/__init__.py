"""The code that runs in the user's interpreter: the processes of episodes, and the interface of the user's files.

Every file needs Python 3.9 and nothing but the standard library, because the user's interpreter may be another one than
the run's (`agent.python`). Only the files that talk to servers need the client packages for them.
"""

"""Built-in environments of conversations; `config/conversation.py` names them.

calculator      a tool that computes an expression
python          a tool that runs a program in the sandbox
search          tools that search a folder of texts and read one
guess_number    a game without tools: find a number by guesses
maze            a game without tools: walk to the exit of a maze

Another environment with tools has public methods, one with turns has `step`. What a rollout meets is a function of the
columns of its row and of the settings, which are the keyword arguments of the class.
"""

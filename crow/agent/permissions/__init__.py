"""Whether a call may run: rules, command lines, questions to the user."""

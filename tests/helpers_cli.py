"""What tests of the command line share."""


def error_of(result):
    """Return the one message of a refused command."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    (message,) = result.stderr.splitlines()
    assert message.startswith("error: ")
    return message

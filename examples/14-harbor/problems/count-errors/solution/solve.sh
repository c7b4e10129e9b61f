grep -c ERROR server.log > errors

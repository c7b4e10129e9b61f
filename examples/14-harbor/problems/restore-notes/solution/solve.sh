tar -xzf backup.tgz

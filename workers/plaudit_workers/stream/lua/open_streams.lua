#!lua flags=allow-oom
-- Creates the streams and their consumer groups that are missing. By: every process, when it starts, and when Redis has
-- lost them. allow-oom: a process that starts while Redis is full may be the one that frees memory.
-- ARGV: '', lost (1: they existed before: count it).
-- Changes: creates missing groups, from the beginning of their stream; groups_recreated + 1. Returns: nothing.
local created = false
for name, reader in pairs(readers) do
  local answer = redis.pcall('XGROUP', 'CREATE', prefix .. name, reader, '0', 'MKSTREAM')
  if not answer.err then
    created = true
  elseif not string.find(answer.err, 'BUSYGROUP', 1, true) then
    return answer
  end
end
if created and ARGV[2] == '1' then count('groups_recreated') end
return false

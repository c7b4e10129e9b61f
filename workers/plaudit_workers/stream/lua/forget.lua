#!lua flags=allow-oom
-- Removes names of consumers that are gone. By: any consumer, on start and when it leaves.
-- ARGV: '', stream, consumer that leaves (may be empty), milliseconds of silence after which a name counts as gone.
-- Checks: nothing is pending under the name (removing it would strand that). Returns: how many were removed.
local name, removed = ARGV[2], 0
local stream = prefix .. name
for _, about in ipairs(redis.call('XINFO', 'CONSUMERS', stream, readers[name])) do
  local field = {}
  for i = 1, #about, 2 do field[about[i]] = about[i + 1] end
  if field.pending == 0 and (field.name == ARGV[3] or field.idle > tonumber(ARGV[4])) then
    redis.call('XGROUP', 'DELCONSUMER', stream, readers[name], field.name)
    removed = removed + 1
  end
end
return removed

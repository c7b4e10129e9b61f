#!lua flags=allow-oom
-- Gives entries back unfinished. By: any consumer, when it drains or fails.
-- ARGV: '', stream, consumer, whether it failed with them (1 or 0), then entry, group, index (- for none) and seconds since it was taken, of each.
-- Checks: this consumer still holds the entry.
-- Changes: the lease lapses at once. After a failure nothing else, as if the lease had lapsed by itself: this delivery
--   counts, and an entry that was worked on alone stays noted as such. Else count - 1, so that whoever takes it has the
--   count that this consumer had; notes who took a sample first.
-- Returns: how many were given back.
local name, consumer, failed, day_ms, given = ARGV[2], ARGV[3], ARGV[4] == '1', 86400000, 0
for i = 5, #ARGV, 4 do
  local owner, deliveries, idle_ms = holder(name, ARGV[i])
  if owner == consumer then
    given = given + 1
    if idle_ms < day_ms then
      redis.call('XCLAIM', prefix .. name, readers[name], consumer, 0, ARGV[i], 'IDLE', day_ms, 'RETRYCOUNT',
        failed and deliveries or math.max(deliveries - 1, 0), 'JUSTID')
      if not failed then note_isolated(ARGV[i + 1], ARGV[i], '') end
      if ARGV[i + 2] ~= '-' then note_first(ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], consumer) end
    end
  end
end
return given

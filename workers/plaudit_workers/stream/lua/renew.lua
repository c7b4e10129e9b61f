#!lua flags=allow-oom
-- Extends leases. By: any consumer, every 5 s.
-- ARGV: '', stream, consumer, number of entries, the entries; then, of samples renewed for the first time, group, index
--   and seconds since it was taken.
-- Checks: this consumer still holds the entry. Changes: its lease starts anew, its count stays; notes who took it first.
-- Returns: the entries that this consumer has lost: it must drop that work.
local name, consumer, entries = ARGV[2], ARGV[3], tonumber(ARGV[4])
local stream, lost = prefix .. name, {}
for i = 5, 4 + entries do
  if holder(name, ARGV[i]) == consumer then
    redis.call('XCLAIM', stream, readers[name], consumer, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
for i = 5 + entries, #ARGV, 3 do note_first(ARGV[i], ARGV[i + 1], ARGV[i + 2], consumer) end
return lost

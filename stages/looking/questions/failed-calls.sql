-- Which calls of tools fail and how: by tool and error, with the share of that tool's calls and an example.
with calls as (
    select *, coalesce(tool, '(cannot be read)') as name
    from tool_calls
    where error is distinct from 'no_answer'
)
select env, name as tool, error, count(*) as failed,
    count(*) / any_value(total) as of_its_calls, count(distinct trajectory_id) as trajectories,
    min(step) as first_step, max(step) as last_step, any_value(args::varchar) as for_example, any_value(result) as result,
    min(trajectory_id) as trajectory_id
from calls
join (select env, name, count(*) as total from calls group by all) using (env, name)
where not ok
group by env, name, error
order by failed desc, tool, error

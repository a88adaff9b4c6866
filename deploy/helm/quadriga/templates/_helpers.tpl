{{- define "quadriga.name" -}}
{{- contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "quadriga.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quadriga.labels" -}}
{{ include "quadriga.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "quadriga.workload" -}}
{{ if .Values.persistence.enabled }}StatefulSet{{ else }}Deployment{{ end }}
{{- end }}

{{/* The file of --config: flags of the values, below those that the chart's other objects rely on. */}}
{{- define "quadriga.config" -}}
{{- $own := dict "host" "0.0.0.0" "port" 8000 "shutdown-timeout" .Values.shutdownTimeout "start-timeout" .Values.startTimeout }}
{{- with .Values.model }}{{ $_ := set $own "model" . }}{{ end }}
{{- if .Values.tenantKeys.secret }}{{ $_ := set $own "keys" "/etc/quadriga/keys/keys.yaml" }}{{ end }}
{{- with .Values.persistence }}
{{- if and .enabled .journal }}{{ $_ := set $own "journal" "/var/lib/quadriga/journal" }}{{ $_ := set $own "resume" true }}{{ end }}
{{- if and .enabled .data }}{{ $_ := set $own "data-dir" "/var/lib/quadriga/data" }}{{ end }}
{{- if and .enabled .kvCache }}{{ $_ := set $own "kv-cache-dir" "/var/lib/quadriga/kv" }}{{ end }}
{{- end }}
{{- range $flag, $_ := .Values.flags }}
{{- if hasKey $own $flag }}{{ fail (printf "flags.%s: the chart sets this flag itself, from its other values" $flag) }}{{ end }}
{{- end }}
{{- merge $own .Values.flags | toYaml }}
{{- end }}

{{- define "quadriga.kvEvents" -}}
{{- $topic := .Values.kvEvents.topic | default (printf "kv@$(POD_IP):8000@%s" .Values.model) }}
{{- dict "enable_kv_cache_events" true "publisher" "zmq" "topic" $topic "endpoint" (printf "tcp://*:%d" (.Values.kvEvents.port | int)) "replay_endpoint" (printf "tcp://*:%d" (.Values.kvEvents.replayPort | int)) | toJson }}
{{- end }}

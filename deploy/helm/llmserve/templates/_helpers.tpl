{{/* At most 58 letters: a Service has five more. */}}
{{- define "llmserve.name" -}}
{{- if contains "llmserve" .Release.Name -}}
{{- .Release.Name | trunc 58 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-llmserve" .Release.Name | trunc 58 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "llmserve.selector" -}}
app.kubernetes.io/name: llmserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "llmserve.labels" -}}
{{ include "llmserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What is wrong with the values, all of it at once. */}}
{{- define "llmserve.problems" -}}
{{- $found := list -}}
{{- with .Values.engine -}}
{{- if and .volumeClaim .repository -}}
{{- $found = append $found "engine: give volumeClaim and path, or repository, not both" -}}
{{- else if not (or .volumeClaim .repository) -}}
{{- $found = append $found "engine: give volumeClaim and path, or repository" -}}
{{- else if and .volumeClaim (not .path) -}}
{{- $found = append $found "engine.path: which directory of the volume claim is the engine?" -}}
{{- else if and .repository .path -}}
{{- $found = append $found "engine.path belongs to a volume claim; leave it out with a repository" -}}
{{- end -}}
{{- if hasPrefix "/" (default "" .path) -}}
{{- $found = append $found "engine.path is relative to the volume: leave out the / at its beginning" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker) -}}
{{- $found = append $found "inferencePool.endpointPicker: the name of the endpoint picker's Service" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- $found = append $found "autoscaling: minReplicas is more than maxReplicas" -}}
{{- end -}}
{{- join "\n" $found -}}
{{- end -}}
